"""Which slots of which segments are free, which objects lie where, and who goes next. In memory; one thread."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from serve.multi_level_cache.disk_index import ObjectRow, SegmentRow
from serve.multi_level_cache.page_state import PageKey
from serve.multi_level_cache.secondary_tier import Checksums


@dataclass(eq=False, slots=True)
class DiskObject:
    """An object in its slot. num_readers: reads in progress; is_cancelled: evicted before its store had ended."""

    key: PageKey
    root: bytes
    segment: int
    slot: int
    checksums: Checksums
    last_use: float
    num_readers: int = 0
    is_cancelled: bool = False

    def row(self) -> ObjectRow:
        """As the index keeps it."""
        return ObjectRow(self.segment, self.slot, self.key, self.root, self.checksums.tobytes(), self.last_use)


@dataclass
class SegmentSpace:
    """One segment of the served namespace."""

    row: SegmentRow
    free: list[int]
    objects: dict[int, DiskObject] = field(default_factory=dict)  # by slot, published ones


class DiskSpace:
    """Segments and objects of the served namespace, LRU by slot size."""

    def __init__(self) -> None:
        self.segments: dict[int, SegmentSpace] = {}
        self._objects: dict[PageKey, DiskObject] = {}
        self._lru: dict[int, OrderedDict[PageKey, DiskObject]] = {}  # by slot size, oldest first

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[DiskObject]:
        return iter(list(self._objects.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots that published objects lie in."""
        return sum(size * len(queue) for size, queue in self._lru.items())

    def find(self, key: PageKey) -> DiskObject | None:
        """A published object."""
        return self._objects.get(key)

    def add_segment(self, row: SegmentRow, free: list[int]) -> None:
        """A segment; of its slots those in `free` hold nothing, and are taken from the end."""
        self.segments[row.number] = SegmentSpace(row, free)

    def publish_older(self, objects: Sequence[DiskObject]) -> None:
        """Objects that were on disk before; each was used no later than all that are published."""
        for each in objects:
            self.publish(each)
            self._lru[self.segments[each.segment].row.slot_bytes].move_to_end(each.key, last=False)

    def num_free(self, slot_bytes: int) -> int:
        """Free slots of a size."""
        return sum(len(each.free) for each in self.segments.values() if each.row.slot_bytes == slot_bytes)

    def num_slots(self, slot_bytes: int) -> int:
        """Slots of a size, free or not."""
        return sum(each.row.num_slots for each in self.segments.values() if each.row.slot_bytes == slot_bytes)

    def take(self, slot_bytes: int) -> tuple[int, int] | None:
        """A free (segment, slot) of a size."""
        for number, space in self.segments.items():
            if space.row.slot_bytes == slot_bytes and space.free:
                return number, space.free.pop()
        return None

    def give_back(self, slots: Sequence[tuple[int, int]]) -> None:
        """These slots hold nothing, neither on disk nor in the index."""
        for segment, slot in slots:
            if segment in self.segments:
                self.segments[segment].free.append(slot)

    def publish(self, each: DiskObject) -> None:
        """The object can be found from now on."""
        space = self.segments[each.segment]
        space.objects[each.slot] = each
        self._objects[each.key] = each
        self._lru.setdefault(space.row.slot_bytes, OrderedDict())[each.key] = each

    def withdraw(self, each: DiskObject) -> None:
        """The object is found no more; its slot stays taken until `give_back`."""
        space = self.segments[each.segment]
        del space.objects[each.slot], self._objects[each.key]
        del self._lru[space.row.slot_bytes][each.key]

    def touch(self, keys: Sequence[PageKey], now: float) -> list[DiskObject]:
        """Used now; the first of a chain most recently, so that the deepest pages go first. Returns those found."""
        found = [each for key in reversed(keys) if (each := self._objects.get(key)) is not None]
        for each in found:
            each.last_use = now
            self._lru[self.segments[each.segment].row.slot_bytes].move_to_end(each.key)
        return found

    def oldest(self, slot_bytes: int, count: int) -> list[DiskObject]:
        """Up to `count` objects of a size that nobody reads, least recently used first."""
        victims: list[DiskObject] = []
        for each in self._lru.get(slot_bytes, {}).values():
            if len(victims) == count:
                break
            if not each.num_readers:
                victims.append(each)
        return victims

    def oldest_segment(self, other_than: int) -> SegmentSpace | None:
        """The segment of another slot size, with no transfer in progress, whose latest use is oldest."""
        idle = [
            space
            for space in self.segments.values()
            if space.row.slot_bytes != other_than
            and len(space.objects) + len(space.free) == space.row.num_slots
            and not any(each.num_readers for each in space.objects.values())
        ]
        return min(idle, key=lambda space: max((e.last_use for e in space.objects.values()), default=0.0), default=None)

    def remove_segment(self, number: int) -> list[DiskObject]:
        """Forget a segment; returns the objects that went with it."""
        gone = list(self.segments[number].objects.values())
        for each in gone:
            self.withdraw(each)
        del self.segments[number]
        return gone

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each."""
        problems = []
        for number, space in self.segments.items():
            slots = [*space.free, *space.objects]
            if len(set(slots)) != len(slots) or not set(slots) <= set(range(space.row.num_slots)):
                problems.append(f"segment {number}: {len(space.free)} free and {len(space.objects)} used slots overlap")
        if sum(len(space.objects) for space in self.segments.values()) != len(self._objects):
            problems.append("an object is in no segment, or in two")
        return problems
