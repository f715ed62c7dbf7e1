"""The host tier's memory: fixed-size slots in one memfd segment, and a header table in another.

The launcher creates both (and stamps the header); the cache manager and the workers attach, and never initialise.
The segments outlive every child. The manager writes generations and names, a worker the checksums of the units that it
stores.

Header segment: a preamble of `PREAMBLE_BYTES`, then generations uint64 [num_slots], names uint8 [num_slots, 32] and
checksums uint64 [num_slots, num_units]. An object of several slots has its checksums in the row of its first slot.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve.hashing import DIGEST_BYTES
from serve.multi_level_cache.object_format import ObjectFormat, choose_slot_bytes

MAGIC = int.from_bytes(b"VARVEHST", "little")
VERSION = 1
PREAMBLE_BYTES = 4096
MANAGER_SHIFT = 48  # a generation's upper 16 bits are the start count of the manager that gave it
_MIN_OBJECTS = 4

_MAGIC, _VERSION, _SLOT_BYTES, _NUM_SLOTS, _NUM_UNITS, _NUM_STARTS = range(6)


class ArenaError(Exception):
    """The segments are not what they should be, or the arena cannot be made; one line for the user."""


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
        return PREAMBLE_BYTES + self.num_slots * (8 + DIGEST_BYTES + 8 * self.num_units)


def arena_shape(formats: Sequence[ObjectFormat], storage_bytes: int) -> ArenaShape:
    """Shape of an arena of at most `storage_bytes` for a model's groups. Raises ArenaError when too few objects fit."""
    slot_bytes = choose_slot_bytes(formats)
    largest = max(entry.num_slots(slot_bytes) for entry in formats)
    num_slots = storage_bytes // slot_bytes
    if num_slots < _MIN_OBJECTS * largest:
        needed = _MIN_OBJECTS * largest * slot_bytes / 2**30
        raise ArenaError(f"--cpu_cache_storage_size is too small for this model: at least {needed:.3f} GiB")
    return ArenaShape(num_slots, slot_bytes, max(len(entry.unit_bytes) for entry in formats))


def manager_of(generation: int) -> int:
    """Start count of the cache manager that gave a generation; a worker refuses those older than its last Resync."""
    return generation >> MANAGER_SHIFT


class HostArena:
    """Both segments, mapped. `create` in the launcher, `attach` everywhere else."""

    def __init__(self, shape: ArenaShape, payload_fd: int, header_fd: int) -> None:
        self.shape = shape
        self.payload_fd = payload_fd
        self.header_fd = header_fd
        self._payload_map = mmap.mmap(payload_fd, shape.payload_bytes)
        self._header_map = mmap.mmap(header_fd, shape.header_bytes)
        # [num_slots, slot_bytes]
        self.payload = np.frombuffer(self._payload_map, dtype=np.uint8).reshape(shape.num_slots, shape.slot_bytes)
        self._preamble = np.frombuffer(self._header_map, dtype=np.uint64, count=8)
        end, num_slots = PREAMBLE_BYTES, shape.num_slots
        self.generation = np.frombuffer(self._header_map, np.uint64, num_slots, end)
        end += 8 * num_slots
        self.name = np.frombuffer(self._header_map, np.uint8, num_slots * DIGEST_BYTES, end).reshape(num_slots, -1)
        end += DIGEST_BYTES * num_slots
        # [num_slots, num_units]
        self.checksum: npt.NDArray[np.uint64] = np.frombuffer(
            self._header_map, np.uint64, num_slots * shape.num_units, end
        ).reshape(num_slots, -1)

    @classmethod
    def create(cls, shape: ArenaShape) -> "HostArena":
        """Make both segments, sparse (memory comes as `ArenaGrower` backs it), and stamp the header."""
        payload_fd = os.memfd_create("varve-arena")
        header_fd = os.memfd_create("varve-arena-header")
        os.ftruncate(payload_fd, shape.payload_bytes)
        os.ftruncate(header_fd, shape.header_bytes)
        arena = cls(shape, payload_fd, header_fd)
        arena._preamble[: _NUM_STARTS + 1] = (MAGIC, VERSION, shape.slot_bytes, shape.num_slots, shape.num_units, 0)
        return arena

    @classmethod
    def attach(cls, payload_fd: int, header_fd: int) -> "HostArena":
        """Map segments that exist. Raises ArenaError unless magic, version and sizes are right."""
        size = os.fstat(header_fd).st_size
        if size < PREAMBLE_BYTES:
            raise ArenaError(f"the arena's header segment has {size} bytes")
        preamble = np.frombuffer(os.pread(header_fd, 8 * (_NUM_STARTS + 1), 0), dtype=np.uint64)
        if (int(preamble[_MAGIC]), int(preamble[_VERSION])) != (MAGIC, VERSION):
            raise ArenaError("the arena's header has another magic or version")
        shape = ArenaShape(int(preamble[_NUM_SLOTS]), int(preamble[_SLOT_BYTES]), int(preamble[_NUM_UNITS]))
        if size != shape.header_bytes or os.fstat(payload_fd).st_size != shape.payload_bytes:
            raise ArenaError("the arena's segments have other sizes than the header says")
        return cls(shape, payload_fd, header_fd)

    def begin_management(self) -> int:
        """For the cache manager, once a start: counts starts and returns how many there were, this one included."""
        self._preamble[_NUM_STARTS] += np.uint64(1)
        return int(self._preamble[_NUM_STARTS])

    def close(self) -> None:
        """Unmap; the file descriptors stay open. Views that others hold keep the maps alive."""
        del self.payload, self.generation, self.name, self.checksum, self._preamble
        for segment in (self._payload_map, self._header_map):
            try:
                segment.close()
            except BufferError:  # somebody still holds a view: unmapped when that is gone
                pass


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
