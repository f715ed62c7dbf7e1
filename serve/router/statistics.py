"""Counters and histograms of the router, as plain data for /metrics."""

from dataclasses import dataclass, field
from typing import Any

from serve.histogram import Histogram
from serve.router.tier_statistics import TierStatistics
from serve.types import CacheTier, FinishReason


@dataclass(slots=True)
class RouterStatistics:
    """Totals since start; all but histograms are plain counters.

    num_snapshots, num_snapshots_skipped: boundaries whose states became checkpoints, or did not for want of pages.
    """

    num_submitted: int = 0
    num_refused: int = 0
    num_stale: int = 0
    num_prompt_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_dropped_tokens: int = 0
    num_preemptions: int = 0
    num_failed_rows: int = 0
    num_snapshots: int = 0
    num_snapshots_skipped: int = 0
    num_steps: int = 0
    num_lost_sends: int = 0
    router_cpu_s: float = 0.0
    cached_tokens: list[int] = field(default_factory=lambda: [0] * len(CacheTier))
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    step_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)
    request_s: Histogram = field(default_factory=Histogram)
    tiers: TierStatistics = field(default_factory=TierStatistics)

    def snapshot(self) -> dict[str, Any]:
        """All of it by name; tiers and reasons by lower-case name."""
        counters = {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}
        return {
            **counters,
            "router_cpu_s": self.router_cpu_s,
            "cached_tokens": {tier.name.lower(): self.cached_tokens[tier] for tier in CacheTier},
            "finished": {reason.name.lower(): count for reason, count in self.finished.items()},
            "step_s": self.step_s.as_data(),
            "queue_s": self.queue_s.as_data(),
            "first_token_s": self.first_token_s.as_data(),
            "request_s": self.request_s.as_data(),
            "tiers": self.tiers.snapshot(),
        }
