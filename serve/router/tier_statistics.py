"""What became of lookups, loads and stores, as plain data for /metrics."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from serve.histogram import Histogram
from serve.types import CacheTier, JobResult


class Drop(Enum):
    """Why something was not loaded, or not stored."""

    AWAY = "manager_away"  # nobody to ask, or its mailbox is full
    LATE = "late"  # no answer within the deadline
    LOST = "lost"  # the manager died, or the lease had ended
    MISSING = "missing"  # evicted between lookup and use
    BUSY = "busy"  # too much is in flight: here, or pinned in the host
    STALE = "stale"  # the request had gone
    NO_ROOM = "no_room"  # the host has no slots to give
    EVICTED = "evicted"  # the device page went before its slot came
    NOT_PAYING = "not_paying"  # recomputing is predicted to be done earlier
    PREEMPTED = "preempted"  # its pages are needed elsewhere
    ENDED = "ended"  # the request ended first
    SLOW = "slow"  # took far longer than predicted
    FLUSHED = "flushed"


@dataclass(slots=True)
class TransferStatistics:
    """One direction. Counts are of jobs, of `dropped` pages for stores and of attempts for loads."""

    num_started: int = 0
    num_ended: dict[JobResult, int] = field(default_factory=lambda: dict.fromkeys(JobResult, 0))
    num_dropped: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))
    num_pages: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    job_s: Histogram = field(default_factory=Histogram)

    def ended(self, result: JobResult, num_pages: int, num_bytes: int, seconds: float) -> None:
        """A job has all its answers."""
        self.num_ended[result] += 1
        self.job_s.observe(seconds)
        if result is JobResult.DONE:
            self.num_pages += num_pages
            self.num_bytes += num_bytes
            self.busy_s += seconds

    def snapshot(self) -> dict[str, Any]:
        """All of it by name."""
        return {
            "num_started": self.num_started,
            "num_pages": self.num_pages,
            "num_bytes": self.num_bytes,
            "num_busy_seconds": self.busy_s,
            "job_s": self.job_s.as_data(),
            **{f"num_jobs_{result.name.lower()}": count for result, count in self.num_ended.items()},
            **{f"num_dropped_{reason.value}": count for reason, count in self.num_dropped.items()},
        }


@dataclass(slots=True)
class TierStatistics:
    """Hits are requests that used a tier at their first admission; misses used none."""

    num_hits: dict[CacheTier, int] = field(default_factory=lambda: dict.fromkeys(CacheTier, 0))
    num_misses: int = 0
    num_lookups: int = 0
    num_lookups_late: int = 0
    num_flushes: int = 0
    loads: TransferStatistics = field(default_factory=TransferStatistics)
    stores: TransferStatistics = field(default_factory=TransferStatistics)

    def admitted(self, cached_tokens: list[int]) -> None:
        """A request was admitted for the first time, with this much cached by tier."""
        for tier in CacheTier:
            self.num_hits[tier] += bool(cached_tokens[tier])
        self.num_misses += not any(cached_tokens)

    def snapshot(self) -> dict[str, Any]:
        """All of it by name."""
        return {
            **{f"num_hits_{tier.name.lower()}": count for tier, count in self.num_hits.items()},
            "num_misses": self.num_misses,
            "num_lookups": self.num_lookups,
            "num_lookups_late": self.num_lookups_late,
            "num_flushes": self.num_flushes,
            "loads": self.loads.snapshot(),
            "stores": self.stores.snapshot(),
        }
