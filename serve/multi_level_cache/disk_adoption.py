"""What a start takes over from a directory: shrinks it to its quota, then reads the index, newest objects first.

It runs on the committer's thread and tells what it has found in pieces, so that nobody waits for a large index: objects
are served as they come, and stores are accepted once all of it is known.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve.multi_level_cache.disk_index import DiskIndex, ObjectRow, SegmentRow
from serve.multi_level_cache.disk_io import SegmentFile
from serve.multi_level_cache.disk_space import DiskObject
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey

CHUNK = 1000  # objects a piece: about a millisecond of the manager's thread
SEGMENT_PREFIX = "segment-"
_OBJECT_TYPES = (int, bytes, str, bytes, bytes, float)

OpenSegment = Callable[[Path, int], SegmentFile]


@dataclass(frozen=True)
class FoundSegments:
    """Comes first. served: segments of the namespace, open; foreign: all others.

    num_strays: files without a row, and num_shrunk: segments beyond the quota, that were deleted.
    """

    served: list[tuple[SegmentRow, SegmentFile]]
    foreign: list[SegmentRow]
    num_strays: int
    num_shrunk: int


@dataclass(frozen=True)
class FoundObjects:
    """Objects of served segments, each used no later than all before it."""

    objects: list[DiskObject]


@dataclass(frozen=True)
class AdoptionEnd:
    """Comes last. free: by served segment, slots without a row, to be taken from the end.

    num_useless: rows that did not fit the model, and were deleted.
    """

    free: dict[int, list[int]]
    num_useless: int


Found = FoundSegments | FoundObjects | AdoptionEnd


@dataclass(frozen=True)
class Adoption:
    """What to take over, and how much of it."""

    directory: Path
    quota_bytes: int
    namespace: bytes
    formats: dict[str, ObjectFormat]
    open_segment: OpenSegment

    def run(self, index: DiskIndex, tell: Callable[[Found], None]) -> None:
        """Raises OSError and sqlite3.Error; what was told until then holds."""
        index.delete_orphans()
        rows = {row.number: row for row in index.segments()}
        num_strays = self._delete_strays(set(rows))
        num_shrunk = self._shrink(index, rows)
        served = [row for row in rows.values() if row.namespace == self.namespace]
        foreign = [row for row in rows.values() if row.namespace != self.namespace]
        index.set_formats(self.namespace, self.formats.values())
        tell(FoundSegments([(row, self._open(row)) for row in served], foreign, num_strays, num_shrunk))
        reader = _ObjectReader(served, self.formats)
        for objects in _chunks(reader.read(index.newest_objects(self.namespace)), CHUNK):
            tell(FoundObjects(objects))
        if reader.useless:
            index.change([], reader.useless)
        tell(AdoptionEnd(reader.free(), len(reader.useless)))

    def _shrink(self, index: DiskIndex, rows: dict[int, SegmentRow]) -> int:
        """Whole segments go until the quota holds: foreign ones first, least recently used first. Returns how many."""
        order = sorted(rows.values(), key=lambda row: (row.namespace == self.namespace, index.last_use(row.number)))
        excess = sum(row.num_bytes for row in order) - self.quota_bytes
        num_gone = 0
        for row in order:
            if excess <= 0:
                break
            index.remove_segment(row.number)
            del rows[row.number]
            self._path(row.number).unlink(missing_ok=True)
            excess -= row.num_bytes
            num_gone += 1
        return num_gone

    def _delete_strays(self, known: set[int]) -> int:
        """Segment files without a row: their making or deleting was cut short, or the index was lost."""
        num_strays = 0
        for path in self.directory.glob(f"{SEGMENT_PREFIX}*"):
            number = path.name.removeprefix(SEGMENT_PREFIX)
            if number.isdigit() and int(number) not in known:
                path.unlink(missing_ok=True)
                num_strays += 1
        return num_strays

    def _path(self, number: int) -> Path:
        return segment_path(self.directory, number)

    def _open(self, row: SegmentRow) -> SegmentFile:
        return self.open_segment(self._path(row.number), row.num_bytes)


def segment_path(directory: Path, number: int) -> Path:
    """Where a segment's bytes are."""
    return directory / f"{SEGMENT_PREFIX}{number:08d}"


class _ObjectReader:
    """Tells objects that can be served from rows that cannot (`useless`: segment and slot)."""

    def __init__(self, served: Sequence[SegmentRow], formats: dict[str, ObjectFormat]) -> None:
        self._num_slots = {row.number: row.num_slots for row in served}
        self._checksum_bytes = {group: 8 * len(form.unit_bytes) for group, form in formats.items()}
        self._taken: dict[int, set[int]] = {row.number: set() for row in served}
        self._seen: set[PageKey] = set()
        self.useless: list[tuple[int, int]] = []

    def read(self, rows: Iterable[ObjectRow]) -> Iterator[DiskObject]:
        for row in rows:
            if self._is_served(row):
                self._seen.add(row.key)
                self._taken[row.segment].add(row.slot)
                sums = np.frombuffer(row.checksums, dtype=np.uint64)
                yield DiskObject(row.key, row.root, row.segment, row.slot, sums, row.last_use)
            else:
                self.useless.append((row.segment, row.slot))

    def _is_served(self, row: ObjectRow) -> bool:
        """It fits the model, its slot is one, and no newer row has the same object."""
        # SQLite keeps a value of any type in any column: one wrong bit may make a number of a name.
        if tuple(map(type, (row.slot, *row.key, row.root, row.checksums, row.last_use))) != _OBJECT_TYPES:
            return False
        fits = len(row.checksums) == self._checksum_bytes.get(row.key.group, -1)
        return fits and 0 <= row.slot < self._num_slots[row.segment] and row.key not in self._seen

    def free(self) -> dict[int, list[int]]:
        return {
            number: [slot for slot in reversed(range(self._num_slots[number])) if slot not in taken]
            for number, taken in self._taken.items()
        }


def _chunks(objects: Iterator[DiskObject], size: int) -> Iterator[list[DiskObject]]:
    while chunk := list(itertools.islice(objects, size)):
        yield chunk
