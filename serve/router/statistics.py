"""Counters and histograms of the router, as plain data for /metrics."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from serve.types import CacheTier, FinishReason

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound, not cumulative; the last bucket has no bound."""

    bounds: tuple[float, ...] = _SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> dict[str, Any]:
        """bounds, counts (one more than bounds), sum."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}


@dataclass(slots=True)
class RouterStatistics:
    """Totals since start; all but histograms are plain counters."""

    num_submitted: int = 0
    num_refused: int = 0
    num_stale: int = 0
    num_prompt_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_dropped_tokens: int = 0
    num_preemptions: int = 0
    num_failed_rows: int = 0
    num_steps: int = 0
    num_lost_sends: int = 0
    router_cpu_s: float = 0.0
    cached_tokens: list[int] = field(default_factory=lambda: [0] * len(CacheTier))
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    step_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)
    request_s: Histogram = field(default_factory=Histogram)

    def snapshot(self) -> dict[str, Any]:
        """All of it by name; tiers and reasons by lower-case name."""
        counters = {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}
        return {
            **counters,
            "router_cpu_s": self.router_cpu_s,
            "cached_tokens": {tier.name.lower(): self.cached_tokens[tier] for tier in CacheTier},
            "finished": {reason.name.lower(): count for reason, count in self.finished.items()},
            "step_s": self.step_s.snapshot(),
            "queue_s": self.queue_s.snapshot(),
            "first_token_s": self.first_token_s.snapshot(),
            "request_s": self.request_s.snapshot(),
        }
