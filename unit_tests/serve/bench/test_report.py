from serve.bench.metrics import RequestRecord, summarize
from serve.bench.report import format_number, format_pass, format_table


def record(**changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "conversation": 0, "turn": 0, "start": 0.0, "end": 2.0, "input_tokens": 100, "output_tokens": 3,
        "expected_output": 3, "ttft": 0.5, "tpot": 0.25, "itls": [0.25, 0.25], "event_times": [0.5, 0.75, 1.0],
        "counted": True, "cached_tokens": 64, "cached_by_tier": {"device": 40, "host": 24},
    }  # fmt: skip
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_table_is_aligned() -> None:
    assert format_table([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"


def test_numbers_have_about_four_digits() -> None:
    assert [format_number(x) for x in (None, 0.123, 12.345, 123.45, 12345.6)] == [
        "-",
        "0.12",
        "12.35",
        "123.5",
        "12,346",
    ]


def test_a_pass_says_everything() -> None:
    text = format_pass("title", summarize([record()]), {})
    assert text.splitlines() == [
        "title",
        "ms     mean    p50    p90    p95    p99    max",
        "TTFT  500.0  500.0  500.0  500.0  500.0  500.0",
        "TPOT  250.0  250.0  250.0  250.0  250.0  250.0",
        "ITL   250.0  250.0  250.0  250.0  250.0  250.0",
        "E2E   2,000  2,000  2,000  2,000  2,000  2,000",
        "1 of 1 requests in 2.00 s: 1.50 output tok/s, 51.50 total tok/s, 0.50 req/s",
        "100 tokens in, 3 out; cached: 64 (64%): device 40, host 24",
    ]


def test_what_is_unusual_has_lines_of_its_own() -> None:
    figures = summarize([record(counted=False, cached_tokens=None, cached_by_tier={}, expected_output=9)])
    figures["server_cpu_s"] = {"router": 0.5, "main": 0.1}
    text = format_pass("title", figures, {"timeout": 2, "http_503": 1})
    for line in (
        "cached: not told",
        "failures: http_503 1, timeout 2",
        "1 answers were shorter than asked for",
        "the server sent no usage",
        "router     0.50    250.000",
        "(2 decode steps, estimated",
    ):
        assert line in text


def test_the_server_s_own_count_of_steps_is_used() -> None:
    text = format_pass("t", summarize([record()]) | {"server_cpu_s": {"router": 0.5}, "server_steps": 100.0}, {})
    assert "router     0.50      5.000\n(100 steps, by the server's count)" in text


def test_failures_only_still_give_a_report() -> None:
    failed = RequestRecord(0, 0, 0.0, 1.0, 0, 0, 3, failure="timeout")
    assert "0 of 1 requests" in format_pass("t", summarize([failed]), {"timeout": 1})
