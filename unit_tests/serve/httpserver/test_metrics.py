import time

from serve.httpserver import admin
from serve.httpserver.metrics import HttpMetrics, MetricsBoard, render
from serve.ipc.control import ControlServer


def test_boards_add_up_and_a_restarted_process_goes_on(tmp_path):
    first, second = HttpMetrics(), HttpMetrics()
    boards = [MetricsBoard(tmp_path, index, metrics) for index, metrics in enumerate((first, second))]
    first.requests.inc(2, "POST", "/v1/completions", "200")
    second.requests.inc(3, "POST", "/v1/completions", "200")
    second.first_token.observe(0.02)
    second.gauges["varve_http_active_sequences"] = 4.0
    boards[1].publish()
    total = boards[0].total()
    assert total.requests.values == {("POST", "/v1/completions", "200"): 5.0}
    assert sum(total.first_token.counts) == 1
    assert total.gauges == {"varve_http_active_sequences": 4.0}
    restarted = HttpMetrics()
    MetricsBoard(tmp_path, 1, restarted)
    assert restarted.requests.values == second.requests.values
    assert restarted.gauges == {}


def test_a_torn_snapshot_is_skipped(tmp_path):
    (tmp_path / "http-metrics-3.json").write_text("{")
    assert MetricsBoard(tmp_path, 0, HttpMetrics()).total().requests.values == {}


def test_histograms_are_cumulative():
    metrics = HttpMetrics()
    for seconds in (0.0005, 0.02, 1000):
        metrics.next_token.observe(seconds)
    lines = render(metrics).decode().splitlines()
    assert 'varve_http_next_token_seconds_bucket{le="0.001"} 1.0' in lines
    assert 'varve_http_next_token_seconds_bucket{le="0.025"} 2.0' in lines
    assert 'varve_http_next_token_seconds_bucket{le="+Inf"} 3.0' in lines
    assert "varve_http_next_token_seconds_count 3.0" in lines


def test_refused_requests_count_no_prompt_tokens(bench, run):
    async def scenario():
        async with bench.client() as client:
            body = {"model": "smol", "prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2}
            bench.router.refuse = (429, "full")
            assert (await client.post("/v1/completions", json=body)).status_code == 429
            bench.router.refuse = None
            assert (await client.post("/v1/completions", json=body | {"n": 2})).status_code == 200

    bench.router.cached = [1, 0, 0]
    run(scenario())
    assert bench.service.metrics.prompt_tokens.values == {(): 5}
    assert bench.service.metrics.cached_tokens.values[("device",)] == 2


def test_parts_that_hang_cost_their_own_numbers_only(build, run, run_dir, monkeypatch):
    monkeypatch.setattr(admin, "METRICS_TIMEOUT_S", 0.1)
    hanging = [ControlServer(run_dir, name, {"statistics": dict}) for name in ("control-router", "control-cache")]
    bench = build(run_dir=run_dir)

    async def scenario():
        async with bench.client() as client:
            return await client.get("/metrics")

    began = time.monotonic()
    text = run(scenario()).text
    assert time.monotonic() - began < 2
    assert "varve_engine_up 1.0" in text
    assert "varve_router_up 0.0" in text
    for server in hanging:
        server.close()


def test_requests_are_timed_until_their_submission_and_so_are_outputs(bench, run):
    async def scenario():
        async with bench.client() as client:
            body = {"model": "smol", "prompt": "Hi", "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.post("/v1/completions", json=body | {"prompt": 5})).status_code == 400

    run(scenario())
    metrics = bench.service.metrics
    assert sum(metrics.prepare.counts) == 1
    assert 0 < metrics.prepare.sum < 5
    assert 0 < metrics.output_seconds.values[()] < 5
