"""The host tier's memory: fixed-size slots in one segment, and a header table in another.

The launcher creates both; the cache manager and the workers attach, and never initialise. The segments outlive every
child. The manager writes generations and names, a worker the checksums of the units that it stores.

Payload of the header segment: the shape, then generations uint64 [num_slots], names uint8 [num_slots, 32] and checksums
uint64 [num_slots, num_units]. An object of several slots has its checksums in the row of its first slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve.hashing import DIGEST_BYTES
from serve.ipc.shm_segment import HEADER_BYTES, Segment, SegmentError, SegmentKind
from serve.multi_level_cache.object_format import ObjectFormat, choose_slot_bytes

PAYLOAD_KIND = SegmentKind(magic=b"vrvarena", version=1)
HEADER_KIND = SegmentKind(magic=b"vrvheadr", version=1)
MANAGER_SHIFT = 48  # a generation's upper 16 bits are the start count of the manager that gave it

_MIN_OBJECTS = 4
_SHAPE_BYTES = 64
_NUM_STARTS = 3  # behind the three numbers of the shape


class ArenaSizeError(Exception):
    """The arena cannot be made with this size; one line for the user."""


@dataclass(frozen=True)
class ArenaShape:
    """Sizes that all processes agree on. num_units: extent units of the group that has most."""

    num_slots: int
    slot_bytes: int
    num_units: int

    @property
    def payload_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def header_bytes(self) -> int:
        return _SHAPE_BYTES + self.num_slots * (8 + DIGEST_BYTES + 8 * self.num_units)


def arena_shape(formats: Sequence[ObjectFormat], storage_bytes: int) -> ArenaShape:
    """Shape of an arena of at most `storage_bytes`. Raises ArenaSizeError when too few of the model's objects fit."""
    slot_bytes = choose_slot_bytes(formats)
    largest = max(entry.num_slots(slot_bytes) for entry in formats)
    num_slots = storage_bytes // slot_bytes
    if num_slots < _MIN_OBJECTS * largest:
        needed = _MIN_OBJECTS * largest * slot_bytes / 2**30
        raise ArenaSizeError(f"--cpu_cache_storage_size is too small for this model, which needs {needed:.3f} GiB")
    return ArenaShape(num_slots, slot_bytes, max(len(entry.unit_bytes) for entry in formats))


def manager_of(generation: int) -> int:
    """Start count of the cache manager that gave a generation; a worker refuses those older than its last Resync."""
    return generation >> MANAGER_SHIFT


class HostArena:
    """Both segments, mapped. `create` in the launcher, `attach` everywhere else."""

    def __init__(self, shape: ArenaShape, payload: Segment, header: Segment) -> None:
        self.shape = shape
        self._segments = (payload, header)
        self.payload_fd, self.header_fd = payload.fd, header.fd
        slots, end = shape.num_slots, _SHAPE_BYTES
        self.payload: npt.NDArray[np.uint8] = payload.array(0, (slots, shape.slot_bytes), np.uint8)
        self._facts: npt.NDArray[np.uint64] = header.array(0, (_NUM_STARTS + 1,), np.uint64)
        self.generation: npt.NDArray[np.uint64] = header.array(end, (slots,), np.uint64)
        end += 8 * slots
        self.name: npt.NDArray[np.uint8] = header.array(end, (slots, DIGEST_BYTES), np.uint8)
        end += DIGEST_BYTES * slots
        self.checksum: npt.NDArray[np.uint64] = header.array(end, (slots, shape.num_units), np.uint64)

    @classmethod
    def create(cls, shape: ArenaShape) -> "HostArena":
        """Make both segments, sparse (memory comes as `ArenaGrower` backs it). Raises OSError."""
        payload = Segment.create(PAYLOAD_KIND, shape.payload_bytes)
        header = Segment.create(HEADER_KIND, shape.header_bytes)
        arena = cls(shape, payload, header)
        arena._facts[:] = (shape.num_slots, shape.slot_bytes, shape.num_units, 0)
        return arena

    @classmethod
    def attach(cls, payload_fd: int, header_fd: int) -> "HostArena":
        """Map segments that exist. Raises SegmentError unless magic, version and sizes are right."""
        header = Segment.attach(header_fd, HEADER_KIND)
        shape = ArenaShape(*(int(value) for value in header.array(0, (_NUM_STARTS,), np.uint64)))
        payload = Segment.attach(payload_fd, PAYLOAD_KIND)
        sizes = (header.size, payload.size)
        if sizes != (HEADER_BYTES + shape.header_bytes, HEADER_BYTES + shape.payload_bytes):
            raise SegmentError(f"the arena's segments have {sizes} bytes, which is not what {shape} takes")
        return cls(shape, payload, header)

    def begin_management(self) -> int:
        """For the cache manager, once a start: counts starts and returns how many there were, this one included."""
        self._facts[_NUM_STARTS] += np.uint64(1)
        return int(self._facts[_NUM_STARTS])

    def close(self) -> None:
        """Close the descriptors. The memory goes when the last view of it goes."""
        for segment in self._segments:
            segment.close()


class ArenaHeaders:
    """The manager's hand on the header table (`SlotHeaders` of the page directory)."""

    def __init__(self, arena: HostArena, num_starts: int) -> None:
        self._arena = arena
        self._floor = num_starts << MANAGER_SHIFT

    def assign(self, slots: Sequence[int], name: bytes) -> tuple[int, ...]:
        """Bump the slots' generations, then write the name and clear the checksums; returns the new generations."""
        generations = self._bump(slots)
        rows = list(slots)
        self._arena.checksum[rows] = 0
        self._arena.name[rows] = np.frombuffer(name, dtype=np.uint8)
        return generations

    def clear(self, slots: Sequence[int]) -> None:
        """The slots hold nothing any more: bump the generations, so that a late reader or writer notices."""
        self._bump(slots)
        self._arena.name[list(slots)] = 0

    def generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Current generations."""
        return tuple(int(self._arena.generation[slot]) for slot in slots)

    def _bump(self, slots: Sequence[int]) -> tuple[int, ...]:
        """At least one more than before, and never below this manager's first."""
        generations = tuple(max(int(self._arena.generation[slot]), self._floor) + 1 for slot in slots)
        self._arena.generation[list(slots)] = generations
        return generations
