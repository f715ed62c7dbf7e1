"""Counts of values by upper bound, as plain data for /metrics."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

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
