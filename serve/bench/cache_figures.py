"""Figures of one working set on one server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.bench.metrics import RequestRecord, summarize
from serve.bench.report import format_number, format_table

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Figures:
    """What came back. hit_rate: share of all prompt tokens, by tier, of requests whose prefix was sent before.

    cold_ttft: of the first request with each prefix. Times are None where nothing was answered.
    """

    working_set: int
    hit_rate: dict[str, float]
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    cold_ttft_p50_ms: float | None
    num_failed: int


def make_figures(working_set: int, cold: Sequence[RequestRecord], again: Sequence[RequestRecord]) -> Figures:
    """cold: first requests of each prefix; again: those that follow."""
    figures, cold_figures = summarize(again), summarize(cold)
    tokens = max(1, figures["input_tokens"])
    times, cold_times = figures["ttft_ms"] or {}, cold_figures["ttft_ms"] or {}
    return Figures(
        working_set,
        {tier: figures["cached_tokens_by_tier"].get(tier, 0) / tokens for tier in TIERS},
        times.get("p50"),
        times.get("p95"),
        cold_times.get("p50"),
        figures["failed"] + cold_figures["failed"],
    )


def format_results(results: Mapping[str, Sequence[Figures]]) -> str:
    """A line for each setup and working set."""
    rows = [["tiers", "prefixes", "hit", *TIERS, "TTFT p50", "p95", "cold p50", "failed"]]
    for setup, figures in results.items():
        for each in figures:
            rates = [sum(each.hit_rate.values()), *(each.hit_rate[tier] for tier in TIERS)]
            times = [each.ttft_p50_ms, each.ttft_p95_ms, each.cold_ttft_p50_ms]
            cells = [*(f"{rate:.0%}" for rate in rates), *(format_number(time) for time in times)]
            rows.append([setup, str(each.working_set), *cells, str(each.num_failed)])
    return format_table(rows) + "\n(hit: share of prompt tokens; times in ms)"


def as_plain_data(results: Mapping[str, Sequence[Figures]]) -> dict[str, list[dict[str, Any]]]:
    """For `--json`."""
    return {setup: [vars(each) for each in figures] for setup, figures in results.items()}
