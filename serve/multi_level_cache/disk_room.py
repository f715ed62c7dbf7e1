"""Room on disk: segments made while the quota allows, then foreign segments deleted, then objects in LRU order.

Nothing here waits: rows are deleted by the committer, and a slot or a segment's bytes come back when that has happened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.multi_level_cache.disk_adoption import AdoptionEnd, FoundSegments, OpenSegment, segment_path
from serve.multi_level_cache.disk_committer import Command, CommitRemoval, CommitSegment, CommitSegmentRemoval
from serve.multi_level_cache.disk_index import SegmentRow
from serve.multi_level_cache.disk_io import SegmentFile
from serve.multi_level_cache.disk_space import DiskObject, DiskSpace

SEGMENT_BYTES = 1 << 30
NUM_THREADS = 4
HANG_S = 30.0
CLOSE_DISK_S = 10.0  # for what was submitted before a stop
EVICT_AHEAD = 16  # free slots of a size to keep, so that a store need not wait for an eviction's transaction


@dataclass(frozen=True)
class DiskOptions:
    """quota_bytes: of all segments together, foreign namespaces included."""

    directory: Path
    quota_bytes: int
    segment_bytes: int = SEGMENT_BYTES
    num_threads: int = NUM_THREADS
    hang_s: float = HANG_S


class DiskRoom:
    """Owns segments and their files. evicted: told of objects that go to make room."""

    def __init__(
        self,
        options: DiskOptions,
        submit: Callable[[Command], None],
        evicted: Callable[[DiskObject], None],
        open_segment: OpenSegment,
    ) -> None:
        self._options = options
        # Groups of objects have segments of their own: no group may take all of a small quota with its first one.
        self._segment_bytes = min(options.segment_bytes, options.quota_bytes // 4)
        self._submit = submit
        self._evicted = evicted
        self._open_segment = open_segment
        self._namespace = b""
        self._next_number = 1
        self._bytes_leaving = 0  # of segments whose deletion is under way
        self._slots_leaving: dict[int, int] = {}  # by slot size: slots whose rows are being deleted
        self._rows_leaving: set[tuple[int, int]] = set()  # (segment, slot) withdrawn, but with a row still
        self.space = DiskSpace()
        self.files: dict[int, SegmentFile] = {}
        self.foreign: dict[int, SegmentRow] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes that all segments may take on disk."""
        rows = [space.row for space in self.space.segments.values()] + list(self.foreign.values())
        return sum(row.num_bytes for row in rows) + self._bytes_leaving

    @property
    def num_leaving(self) -> int:
        """Objects that nobody finds, but whose rows are there; those whose rows could not be deleted stay counted."""
        return len(self._rows_leaving) + bool(self._bytes_leaving)

    # --- start -----------------------------------------------------------------------------------------------------

    def adopt_segments(self, namespace: bytes, found: FoundSegments) -> None:
        """The first that is known of the directory; objects follow."""
        self._namespace = namespace
        self.foreign = {row.number: row for row in found.foreign}
        for row, file in found.served:
            self.files[row.number] = file
            self.space.add_segment(row, [])
        self._next_number = max([*self.foreign, *self.files], default=0) + 1

    def adopt_objects(self, objects: Sequence[DiskObject], is_gone: Callable[[DiskObject], bool]) -> None:
        """Objects of these segments, each used no later than all before it. is_gone: evicted before it was known."""
        self.space.publish_older([each for each in objects if not is_gone(each)])
        gone = [each for each in objects if is_gone(each)]
        for each in gone:
            each.is_cancelled = True
        self.delete_rows(gone)

    def adopt_free(self, found: AdoptionEnd) -> None:
        """The slots that nothing lies in. Slots that came back meanwhile are free already."""
        for number, free in found.free.items():
            self.space.segments[number].free.extend(free)

    def _path(self, number: int) -> Path:
        return segment_path(self._options.directory, number)

    # --- room ------------------------------------------------------------------------------------------------------

    def make_room(self, slot_bytes: int) -> None:
        """See to it that slots of a size are free, now or soon. Raises OSError when a segment cannot be made."""
        num_slots = self.space.num_slots(slot_bytes)
        wanted = min(EVICT_AHEAD, max(1, num_slots // 8))
        if self.space.num_free(slot_bytes) + self._slots_leaving.get(slot_bytes, 0) >= wanted:
            return
        if self._add_segment(slot_bytes) or self._bytes_leaving:
            return
        if self.foreign:
            self._remove_foreign()
            return
        if not num_slots:
            self._remove_other_size(slot_bytes)
            return
        victims = self.space.oldest(slot_bytes, wanted)
        for victim in victims:
            self._evicted(victim)
        self.remove(victims)

    def _add_segment(self, slot_bytes: int) -> bool:
        left = self._options.quota_bytes - self.total_bytes
        num_slots = min(self._segment_bytes, left) // slot_bytes
        if num_slots < 1 or (left < self._segment_bytes and self.space.num_slots(slot_bytes)):
            return False
        row = SegmentRow(self._next_number, self._namespace, slot_bytes, num_slots)
        self.files[row.number] = self._open_segment(self._path(row.number), row.num_bytes)
        self._next_number += 1
        self.space.add_segment(row, list(reversed(range(num_slots))))
        self._submit(CommitSegment(row))
        return True

    def _remove_foreign(self) -> None:
        """The oldest foreign segment by number: the namespace that was served longest ago made it first."""
        number = min(self.foreign)
        row = self.foreign.pop(number)
        self._delete_segment(row, self._open_segment(self._path(number), row.num_bytes))

    def _remove_other_size(self, slot_bytes: int) -> None:
        space = self.space.oldest_segment(other_than=slot_bytes)
        if space is None:
            return
        for each in self.space.remove_segment(space.row.number):
            self._evicted(each)
        self._delete_segment(space.row, self.files.pop(space.row.number))

    def _delete_segment(self, row: SegmentRow, file: SegmentFile) -> None:
        self._bytes_leaving += row.num_bytes
        self._submit(CommitSegmentRemoval(row.number, file))

    def segment_is_gone(self, file: SegmentFile) -> None:
        """A deletion has ended."""
        self._bytes_leaving -= file.num_bytes

    def remove(self, objects: Sequence[DiskObject]) -> None:
        """These are found no more; their slots come back after their rows, and their readers, are gone."""
        for each in objects:
            self.space.withdraw(each)
            each.is_cancelled = True
            self._rows_leaving.add((each.segment, each.slot))
        self.delete_rows([each for each in objects if not each.num_readers])

    def delete_rows(self, objects: Sequence[DiskObject]) -> None:
        """Delete the rows of objects that nobody finds or reads; then their slots are free."""
        if not objects:
            return
        for each in objects:
            size = self.space.segments[each.segment].row.slot_bytes
            self._slots_leaving[size] = self._slots_leaving.get(size, 0) + 1
            self._rows_leaving.add((each.segment, each.slot))
        self._submit(CommitRemoval([(each.segment, each.slot) for each in objects]))

    def rows_are_gone(self, slots: Sequence[tuple[int, int]], is_done: bool) -> None:
        """Slots may be used again, unless their rows could not be deleted (then they stay out of use)."""
        for segment, _ in slots:
            self._slots_leaving[self.space.segments[segment].row.slot_bytes] -= 1
        if is_done:
            self._rows_leaving.difference_update(slots)
            self.space.give_back(slots)

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
