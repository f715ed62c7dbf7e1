"""The host tier as the manager's handlers see it: formats, directory, leases and how much of the arena may be held."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.multi_level_cache.host_arena import ArenaHeaders, HostArena
from serve.multi_level_cache.leases import LeaseTable
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_directory import PageDirectory
from serve.multi_level_cache.slot_pool import SlotPool
from serve.multi_level_cache.statistics import CacheStatistics

CLEAN_SHARE = 0.05
MAX_HELD_SHARE = 0.5


class HostBudget:
    """How many slots may be in use in ways that eviction cannot undo. num_promoting: slots that promotions fill."""

    def __init__(self, pool: SlotPool, directory: PageDirectory) -> None:
        self._pool = pool
        self._directory = directory
        self.num_promoting = 0

    @property
    def num_usable(self) -> int:
        """Slots that can hold pages now."""
        return self._pool.num_backed - self._pool.num_blocked

    @property
    def num_reserved(self) -> int:
        """Slots that stay free or evictable at once."""
        return -int(-self.num_usable * CLEAN_SHARE // 1)

    def can_fill(self, num_slots: int) -> bool:
        """May a store fill so many more? The clean reserve stays."""
        held = self._directory.slots_filling + self._directory.slots_pinned
        return held + num_slots <= self.num_usable - self.num_reserved

    def can_hold(self, num_slots: int) -> bool:
        """May so many more be pinned or promoted? All together stay below half of the arena."""
        held = self._directory.slots_pinned + self.num_promoting + num_slots
        return held < self.num_usable * MAX_HELD_SHARE


@dataclass(frozen=True)
class HostTier:
    """One arena with everything that is known about it."""

    arena: HostArena
    formats: dict[str, ObjectFormat]
    pool: SlotPool
    directory: PageDirectory
    leases: LeaseTable
    budget: HostBudget
    stats: CacheStatistics
    clock: Callable[[], float]

    @classmethod
    def build(
        cls, arena: HostArena, formats: Sequence[ObjectFormat], num_starts: int, clock: Callable[[], float]
    ) -> "HostTier":
        """An empty tier over an attached arena; slots become usable as `pool.grow` says that they are backed."""
        stats, pool = CacheStatistics(), SlotPool(arena.shape.num_slots)
        directory = PageDirectory(pool, ArenaHeaders(arena, num_starts), clock, stats)
        by_group = {entry.group: entry for entry in formats}
        return cls(arena, by_group, pool, directory, LeaseTable(clock), HostBudget(pool, directory), stats, clock)

    def num_slots(self, group: str) -> int:
        """Slots that one object of a group takes."""
        return self.formats[group].num_slots(self.arena.shape.slot_bytes)
