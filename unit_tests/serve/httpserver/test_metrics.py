from serve.httpserver.metrics import HttpMetrics, MetricsBoard, flatten_statistics, render


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
    lines = render(metrics, {}).decode().splitlines()
    assert 'varve_http_next_token_seconds_bucket{le="0.001"} 1.0' in lines
    assert 'varve_http_next_token_seconds_bucket{le="0.025"} 2.0' in lines
    assert 'varve_http_next_token_seconds_bucket{le="+Inf"} 3.0' in lines
    assert "varve_http_next_token_seconds_count 3.0" in lines


def test_statistics_of_other_processes_become_names():
    found = flatten_statistics("router", {"num_steps": 3, "cached tokens": {"host": 1}, "text": "x", "router_cpu_s": 2})
    assert found == {"varve_router_num_steps": 3.0, "varve_router_cached_tokens_host": 1.0, "varve_router_cpu_s": 2.0}
