import pytest

from serve.bench.client import Answer
from serve.bench.http_stream import Failure, FailureKind
from serve.bench.metrics import RequestRecord, decode_steps, distribution_ms, make_record, median_of, summarize
from serve.bench.sse import PromptTokensDetails, Usage


def record(
    start: float = 0.0, times: tuple[float, ...] = (1.0, 2.0, 4.0), usage: Usage | None = None, wanted: int = 3
) -> RequestRecord:
    answer = Answer(start, times[-1] + 0.5, event_times=list(times), usage=usage)
    return make_record(answer, 0, 0, 10, wanted)


def failed(kind: FailureKind, detail: str = "x") -> RequestRecord:
    return make_record(Answer(0.0, 1.0, failure=Failure(kind, detail)), 0, 0, 10, 3)


def cached(total: int, **tiers: int) -> Usage:
    return Usage(12, 3, PromptTokensDetails(total, tiers or None))


def test_latencies_of_a_record() -> None:
    got = record(start=0.5)
    assert (got.ttft, got.tpot, got.itls) == (0.5, 1.5, [1.0, 2.0])


def test_tokens_come_from_usage_and_else_from_what_was_seen() -> None:
    told = record(usage=Usage(12, 4))
    assert (told.input_tokens, told.output_tokens, told.counted, told.tpot) == (12, 4, True, 1.0)
    seen = record()
    assert (seen.input_tokens, seen.output_tokens, seen.counted, seen.cached_tokens) == (10, 3, False, None)


def test_one_token_has_no_time_between_tokens() -> None:
    assert record(times=(1.0,)).tpot is None


def test_tiers_are_read_in_either_place() -> None:
    assert record(usage=cached(8, device=6, host=2)).cached_by_tier == {"device": 6, "host": 2}
    beside = Usage(12, 3, PromptTokensDetails(8), {"disk": 8})
    assert record(usage=beside).cached_by_tier == {"disk": 8}


def test_percentiles_are_linear_between_ranks() -> None:
    values = distribution_ms([i / 1000 for i in range(1, 101)])
    assert values is not None
    assert values == pytest.approx(
        {"mean": 50.5, "min": 1, "p50": 50.5, "p90": 90.1, "p95": 95.05, "p99": 99.01, "max": 100}
    )
    assert distribution_ms([]) is None
    one = distribution_ms([0.002])
    assert one is not None
    assert set(one.values()) == {2.0}


def test_a_summary_adds_up() -> None:
    records = [
        record(usage=cached(8, device=8)),
        record(start=1.0, times=(2.0, 3.5), usage=Usage(20, 2, PromptTokensDetails(4, {"host": 4}))),
        failed(FailureKind.TIMEOUT),
        failed(FailureKind.HTTP_STATUS, "503 busy"),
        failed(FailureKind.HTTP_STATUS, "503 busy"),
    ]
    got = summarize(records)
    assert got["duration_s"] == 4.5
    assert (got["requests"], got["completed"], got["failed"]) == (5, 2, 3)
    assert got["failures"] == {"timeout": 1, "http_503": 2}
    assert (got["input_tokens"], got["output_tokens"]) == (32, 5)
    assert (got["cached_tokens"], got["cached_tokens_by_tier"]) == (12, {"device": 8, "host": 4})
    assert got["output_tokens_per_s"] == pytest.approx(5 / 4.5)
    assert got["total_tokens_per_s"] == pytest.approx(37 / 4.5)
    assert got["requests_per_s"] == pytest.approx(2 / 4.5)
    assert got["ttft_ms"]["mean"] == 1000
    assert got["itl_ms"]["max"] == 2000
    assert got["e2e_ms"]["min"] == 3000
    assert got["short_answers"] == 1
    assert got["counted_by_server"]


def test_a_summary_of_failures_only() -> None:
    got = summarize([failed(FailureKind.CONNECT)])
    assert (got["completed"], got["ttft_ms"], got["cached_tokens"], got["decode_steps"]) == (0, None, None, 0.0)


def test_decode_steps_are_shared_by_the_requests_that_decode_together() -> None:
    assert decode_steps([record(times=(0.0, 1.0, 2.0))]) == 2.0
    together = [record(times=(0.0, 1.0, 2.0)) for _ in range(4)]
    assert decode_steps(together) == pytest.approx(2.0)
    overlapping = [record(times=(0.0, 1.0, 2.0, 3.0)), record(times=(1.0, 2.0, 3.0, 4.0))]
    assert decode_steps(overlapping) == pytest.approx(4.0)
    assert decode_steps([record(times=(0.0,))]) == 0.0


def test_medians_go_leaf_by_leaf() -> None:
    repeats = [
        {"a": 1, "d": {"x": 5}, "n": None, "f": True},
        {"a": 9, "d": {"x": 7, "y": 1}, "n": 3, "f": True},
        {"a": 2},
    ]
    assert median_of(repeats) == {"a": 2.0, "d": {"x": 6.0, "y": 1.0}, "n": 3.0, "f": True}
