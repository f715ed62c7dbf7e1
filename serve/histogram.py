"""Counts of values by upper bound, as plain data that /metrics is made of."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """counts: not cumulative, one more than `bounds`, as the last bucket has none; sum: of all values."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add one value; one that is a bound counts below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def as_data(self) -> dict[str, Any]:
        """bounds, counts and sum by name."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}
