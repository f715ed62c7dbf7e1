"""Which pages lie in the tiers below the device.

There is no tier yet: every probe is a miss. A tier is a `PageDirectory`; host arena and disk will each be one.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from serve.ipc.messages import Probe, ProbeReply
from serve.ipc.request_table import RequestTable


class PageDirectory(Protocol):
    """Knows which pages one tier holds. Called on the cache manager's thread only; never blocks."""

    def find(self, group: str, names: list[bytes]) -> bytes:
        """Bitmap of `names` that this tier holds and can hand out: bit i (little-endian bytes) is names[i]."""

    def check(self) -> list[str]:
        """One line for each thing that does not add up."""


class EmptyDirectory:
    """A tier that holds nothing."""

    def find(self, group: str, names: list[bytes]) -> bytes:
        return bytes(-(-len(names) // 8))

    def check(self) -> list[str]:
        return []


@dataclass
class CacheCounters:
    """Since the start of this process."""

    probes: int = 0
    stale_probes: int = 0
    pages_asked: int = 0


@dataclass
class CacheManager:
    """Answers probes from its directories. groups: names of the engine's state groups, once it is up."""

    table: RequestTable
    host: PageDirectory = field(default_factory=EmptyDirectory)
    disk: PageDirectory = field(default_factory=EmptyDirectory)
    groups: list[str] = field(default_factory=list)
    epoch: int = 0
    counters: CacheCounters = field(default_factory=CacheCounters)

    def engine_up(self, epoch: int, groups: list[str]) -> None:
        """A new engine group with these state groups answers."""
        self.epoch = epoch
        self.groups = groups

    def engine_down(self, epoch: int) -> None:
        """The engine group of `epoch` is gone, and with it every job of that epoch."""
        if epoch == self.epoch:
            self.groups = []

    def probe(self, probe: Probe) -> ProbeReply | None:
        """What the tiers hold of a request's pages; None when the slot has another request by now."""
        self.counters.probes += 1
        if self.table.generation(probe.slot) != probe.generation:
            self.counters.stale_probes += 1
            return None
        names = self.table.names(probe.slot)[: probe.num_pages]
        self.counters.pages_asked += len(names)
        return ProbeReply(
            probe_id=probe.probe_id,
            host={group: self.host.find(group, names) for group in self.groups},
            disk={group: self.disk.find(group, names) for group in self.groups},
        )

    def check(self) -> list[str]:
        """One line for each thing that does not add up in any tier."""
        return self.host.check() + self.disk.check()

    def statistics(self) -> dict[str, Any]:
        """Counters, as plain data."""
        return {
            "num_probes": self.counters.probes,
            "num_stale_probes": self.counters.stale_probes,
            "num_pages_asked": self.counters.pages_asked,
        }
