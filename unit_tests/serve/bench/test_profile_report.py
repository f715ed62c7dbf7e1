"""Parts of latencies add up to what the client has seen."""

import pytest

from serve.bench.profile_report import Measured, breakdown, format_breakdown, read_metrics


def measured() -> Measured:
    """Two requests of 10 tokens each, whose prompts took two steps each."""
    phases = {"prepare": 0.02, "forward": 0.4, "sample": 0.004, "answer": 0.002}
    steps = {
        "prefill": {
            "steps": 4,
            "tokens": 1000,
            "phases": phases,
            "kernels": {"linear": [40, 0.3], "paged_attention": [40, 0.06]},
        },
        "decode": {
            "steps": 18,
            "tokens": 18,
            "phases": {"wait": 0.009, "prepare": 0.018, "forward": 0.18, "sample": 0.0018, "answer": 0.0018},
            "kernels": {"linear": [180, 0.126]},
        },
    }
    metrics = {
        "varve_http_prepare_seconds_sum": 0.01,
        "varve_http_prepare_seconds_count": 2.0,
        "varve_http_first_token_seconds_sum": 0.5,
        "varve_http_first_token_seconds_count": 2.0,
        "varve_router_first_token_seconds_sum": 0.48,
        "varve_router_first_token_seconds_count": 2.0,
        "varve_router_queue_seconds_sum": 0.002,
        "varve_router_queue_seconds_count": 2.0,
    }
    figures = {"completed": 1, "ttft_ms": {"mean": 260.0}, "tpot_ms": {"mean": 12.0}, "server_cpu_s": {"router": 0.011}}
    return Measured(steps, metrics, [figures, figures])


def test_the_parts_of_a_first_token_are_differences_of_nested_intervals():
    first = breakdown(measured())["first token"]
    assert first["client, connection, HTTP parsing"] == pytest.approx(260 - 5 - 250)
    assert first["HTTP process: body, tokens, page names"] == pytest.approx(5)
    assert first["messages HTTP process to router and back"] == pytest.approx(10)
    assert first["router: queue"] == pytest.approx(1)
    assert first["messages router to worker and back"] == pytest.approx(240 - 1 - 213)
    assert first["kernel linear"] == pytest.approx(150)
    assert first["worker: Python between kernels"] == pytest.approx(20)
    assert first.pop("total") == pytest.approx(sum(first.values()))


def test_the_parts_of_a_token_are_those_of_a_step():
    found = breakdown(measured())
    token = found["a token"]
    assert token["worker: waiting for a plan"] == pytest.approx(0.5)
    assert token["kernel linear"] == pytest.approx(7)
    assert token["worker: Python between kernels"] == pytest.approx(3)
    assert token.pop("total") == pytest.approx(sum(token.values())) == pytest.approx(12)
    assert found["CPU a step"] == {"router": pytest.approx(1.0)}


def test_tables_show_all_parts():
    text = format_breakdown(breakdown(measured()), {"ttft_ms": 250.0, "tpot_ms": 11.5})
    assert "kernel paged_attention" in text
    assert "57.7%" in text  # 150 of 260 ms
    assert text.endswith("without the profiler: first token 250.0 ms, a token 11.50 ms")
    assert format_breakdown({}, {}) == "no prefill and decode steps were recorded"


def test_metrics_without_labels_are_read():
    text = '# TYPE x counter\nvarve_a_total 3.0\nvarve_b{x="1"} 2.0\nvarve_c_seconds_sum 1e-3\nother 4\n'
    assert read_metrics(text) == {"varve_a_total": 3.0, "varve_c_seconds_sum": 0.001}
