"""Figures out of measured answers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from serve.bench.client import Answer
from serve.bench.http_stream import FailureKind

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class RequestRecord:
    """One request. Times are seconds; start and end are on the clock of `time.perf_counter`.

    ttft: from before connecting to the first output. tpot: mean time of a token after the first, None of one token.
    itls: gaps between events with output. input_tokens, output_tokens: the server's count, else the expected one and
    the number of events. counted: whether the server counted. cached_by_tier: as far as the server tells.
    """

    conversation: int
    turn: int
    start: float
    end: float
    input_tokens: int
    output_tokens: int
    expected_output: int
    ttft: float | None = None
    tpot: float | None = None
    itls: list[float] = field(default_factory=list)
    event_times: list[float] = field(default_factory=list)
    counted: bool = False
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    failure: str | None = None
    failure_detail: str = ""


def make_record(answer: Answer, conversation: int, turn: int, input_len: int, output_len: int) -> RequestRecord:
    """The record of an answer to a prompt of about `input_len` tokens that asked for `output_len`."""
    usage, times = answer.usage, answer.event_times
    if answer.failure is not None:
        kind = answer.failure.kind
        name = f"http_{answer.failure.detail.split()[0]}" if kind is FailureKind.HTTP_STATUS else kind.value
        return RequestRecord(
            conversation, turn, answer.start, answer.end, 0, 0, output_len,
            failure=name, failure_detail=answer.failure.detail,
        )  # fmt: skip
    counted = usage is not None and usage.completion_tokens is not None
    output = usage.completion_tokens if usage is not None and usage.completion_tokens is not None else len(times)
    prompt = usage.prompt_tokens if usage is not None and usage.prompt_tokens is not None else input_len
    details = usage.prompt_tokens_details if usage is not None else None
    tiers = (details.cached_tokens_by_tier if details else None) or (usage.cached_tokens_by_tier if usage else None)
    return RequestRecord(
        conversation=conversation,
        turn=turn,
        start=answer.start,
        end=answer.end,
        input_tokens=prompt,
        output_tokens=output,
        expected_output=output_len,
        ttft=times[0] - answer.start,
        tpot=(times[-1] - times[0]) / (output - 1) if output > 1 else None,
        itls=[after - before for before, after in pairwise(times)],
        event_times=times,
        counted=counted,
        cached_tokens=details.cached_tokens if details else None,
        cached_by_tier=tiers or {},
    )


def distribution_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (linear between ranks) and extremes in milliseconds; None of nothing."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    points = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(values.mean()), "min": float(values.min()), **named, "max": float(values.max())}


def summarize(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """All figures of one pass. The duration runs from the first send to the last end."""
    good = [record for record in records if record.failure is None]
    duration = max(r.end for r in records) - min(r.start for r in records)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.input_tokens for r in good)
    return {
        "duration_s": duration,
        "requests": len(records),
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(Counter(r.failure for r in records if r.failure is not None)),
        "short_answers": sum(r.output_tokens < r.expected_output for r in good),
        "counted_by_server": all(r.counted for r in good),
        "input_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": _cached_total(good),
        "cached_tokens_by_tier": _by_tier(good),
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "requests_per_s": len(good) / duration,
        "ttft_ms": distribution_ms([r.ttft for r in good if r.ttft is not None]),
        "tpot_ms": distribution_ms([r.tpot for r in good if r.tpot is not None]),
        "itl_ms": distribution_ms([gap for r in good for gap in r.itls]),
        "e2e_ms": distribution_ms([r.end - r.start for r in good]),
        "decode_steps": decode_steps(good),
    }


def _cached_total(records: Sequence[RequestRecord]) -> int | None:
    """Cached tokens; None when no server answer tells."""
    told = [r.cached_tokens for r in records if r.cached_tokens is not None]
    return sum(told) if told else None


def _by_tier(records: Sequence[RequestRecord]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.cached_by_tier)
    return dict(total)


def decode_steps(records: Sequence[RequestRecord]) -> float:
    """Estimate of the decode steps that the server ran: a token of k requests decoding together is 1/k of a step.

    A request decodes between its first and its last event.
    """
    spans = [(r.event_times[0], r.event_times[-1]) for r in records if len(r.event_times) > 1]
    if not spans:
        return 0.0
    starts = np.sort([first for first, _ in spans])
    ends = np.sort([last for _, last in spans])
    tokens = np.concatenate([np.asarray(r.event_times[1:]) for r in records if len(r.event_times) > 1])
    decoding = np.searchsorted(starts, tokens, side="left") - np.searchsorted(ends, tokens, side="left")
    return float((1.0 / np.maximum(decoding, 1)).sum())


def median_of(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Leaf by leaf median of the repeats' figures; other leaves are taken from the first that has them."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for summary in summaries for key in summary):
        values = [summary[key] for summary in summaries if summary.get(key) is not None]
        if not values:
            merged[key] = None
        elif isinstance(values[0], dict):
            merged[key] = median_of(values)
        elif isinstance(values[0], int | float) and not isinstance(values[0], bool):
            merged[key] = float(np.median(values))
        else:
            merged[key] = values[0]
    return merged
