"""Counters of the host tier, as plain data for the control plane and the metrics."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve.histogram import Histogram
from serve.multi_level_cache.page_state import DropReason, TierTicket

AGE_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
TRANSFER_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class TransferMeter:
    """Times of one direction's transfers from submission to end, and bytes of those that went well."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[TierTicket, float] = {}
        self.times = Histogram(TRANSFER_BOUNDS_S)
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, ticket: TierTicket) -> None:
        """It was submitted."""
        self._begun[ticket] = self._clock()

    def end(self, ticket: TierTicket, num_bytes: int | None) -> None:
        """It has ended; only what went well has bytes, and counts."""
        began = self._begun.pop(ticket, None)
        if began is not None and num_bytes is not None:
            self.times.observe(self._clock() - began)
            self.num_bytes += num_bytes


class TransferSpeed:
    """Bytes a second over the time in which at least one transfer runs; one that hangs lowers it while it hangs.

    It is the geometric mean of the last period's speed and of what was believed before it, so that a few quick reads
    outweigh one that took minutes. A period ends when nothing runs any more, or after `MAX_PERIOD_S`. A shorter one in
    which everything failed is no measurement: what is missing says nothing of how fast the rest comes.
    """

    MAX_PERIOD_S = 2.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_running = 0
        self._since = 0.0
        self._bytes = 0  # of this period
        self._size = 0  # of the transfer that began last
        self._speed = 0.0  # of earlier periods; 0: there were none
        self.ended_at = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Nothing runs."""
        return not self._num_running

    def begin(self, num_bytes: int) -> None:
        """One more runs, for so many bytes."""
        if not self._num_running:
            self._since, self._bytes = self._clock(), 0
        self._num_running += 1
        self._size = num_bytes

    def end(self, num_bytes: int) -> None:
        """One has ended, and brought so many bytes."""
        self.ended_at = self._clock()
        elapsed = self.ended_at - self._since
        self._bytes += num_bytes
        self._num_running -= 1
        is_over = elapsed > self.MAX_PERIOD_S or (elapsed > 0 and not self._num_running and self._bytes > 0)
        if is_over:
            measured = max(1.0, self._bytes / elapsed)
            self._speed = (self._speed * measured) ** 0.5 if self._speed else measured
            self._since, self._bytes = self.ended_at, 0

    def bytes_per_s(self) -> float:
        """0 while nothing is known; otherwise at least 1."""
        elapsed = self._clock() - self._since if self._num_running else 0.0
        if elapsed <= 0:
            return self._speed
        at_most = max(1.0, (self._bytes + self._size) / elapsed)  # should one more end now
        if not self._speed:
            return at_most if self._bytes or elapsed > self.MAX_PERIOD_S else 0.0
        return min(self._speed, at_most)


@dataclass
class CacheStatistics:
    """What has happened since the start. `events`: counts of unusual things by name, such as late answers."""

    probes: int = 0
    pages_probed: Counter[str] = field(default_factory=Counter)  # by group
    pages_hit: Counter[str] = field(default_factory=Counter)  # by group, in the host
    loads_granted: int = 0
    loads_refused: Counter[str] = field(default_factory=Counter)  # by outcome
    bytes_loaded: int = 0
    bytes_stored: int = 0
    pages_granted: int = 0
    pages_refused: int = 0
    pages_published: int = 0
    pages_promoted: int = 0
    pages_persisted: int = 0
    pages_withheld: Counter[str] = field(default_factory=Counter)  # kept from the lower tier by its rules, by reason
    drops: Counter[str] = field(default_factory=Counter)  # by reason
    events: Counter[str] = field(default_factory=Counter)
    eviction_ages: Histogram = field(default_factory=lambda: Histogram(AGE_BOUNDS_S))

    def count_drop(self, reason: DropReason) -> None:
        """One object became EMPTY."""
        self.drops[reason.value] += 1

    def as_data(self) -> dict[str, Any]:
        """All counters as numbers, dicts and lists."""
        data: dict[str, Any] = {}
        for name, value in vars(self).items():
            data[name] = dict(value) if isinstance(value, Counter) else value
        data["eviction_ages"] = self.eviction_ages.as_data()
        data["checksum_failures"] = self.drops[DropReason.CHECKSUM.value]
        return data
