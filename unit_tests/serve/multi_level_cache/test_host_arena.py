"""The arena's segments: created once, attached anywhere, backed step by step."""

import os

import numpy as np
import pytest

from serve.ipc.shm_segment import HEADER_BYTES, SegmentError
from serve.multi_level_cache.arena_growth import ArenaGrower, Growth
from serve.multi_level_cache.host_arena import ArenaHeaders, ArenaShape, ArenaSizeError, HostArena, arena_shape
from unit_tests.serve.multi_level_cache.builders import FORMATS

SHAPE = ArenaShape(16, 4096, 3)


def test_attached_arenas_see_what_others_write():
    created = HostArena.create(SHAPE)
    attached = HostArena.attach(os.dup(created.payload_fd), os.dup(created.header_fd))
    assert attached.shape == SHAPE
    generations = ArenaHeaders(created, 1).assign([3, 5], b"n" * 32)
    created.payload[3, :] = 7
    attached.checksum[3, 1] = 99
    assert (attached.payload[3] == 7).all()
    assert attached.generation[[3, 5]].tolist() == list(generations)
    assert attached.name[5].tobytes() == b"n" * 32
    assert created.checksum[3].tolist() == [0, 99, 0]
    assert (attached.begin_management(), created.begin_management()) == (1, 2)
    attached.close()
    created.close()


def test_other_segments_are_refused():
    arena, other = HostArena.create(SHAPE), HostArena.create(ArenaShape(17, 4096, 3))
    with pytest.raises(SegmentError, match="magic"):
        HostArena.attach(arena.header_fd, arena.payload_fd)
    with pytest.raises(SegmentError, match="segments have"):
        HostArena.attach(other.payload_fd, arena.header_fd)


def test_assigning_clears_checksums_and_clearing_bumps_generations():
    arena = HostArena.create(SHAPE)
    headers = ArenaHeaders(arena, 2)
    (first,) = headers.assign([0], b"a" * 32)
    arena.checksum[0] = 5
    headers.clear([0])
    (second,) = headers.assign([0], b"b" * 32)
    assert first >> 48 == 2
    assert second == first + 2
    assert not arena.checksum[0].any()


def test_a_size_that_holds_too_few_objects_is_refused():
    assert arena_shape(FORMATS, 1 << 20).num_slots == (1 << 20) // arena_shape(FORMATS, 1 << 20).slot_bytes
    with pytest.raises(ArenaSizeError, match="too small"):
        arena_shape(FORMATS, 20000)


def grow(size: int, room: list[int] | None = None, **more: object) -> list[Growth]:
    """All that an `ArenaGrower` tells, in steps of 4096 bytes."""
    rooms = iter(room or [1 << 30] * 100)
    arena = HostArena.create(SHAPE)
    grower = ArenaGrower(arena.payload_fd, HEADER_BYTES, size, 4096, lambda: next(rooms), **more)  # type: ignore[arg-type]
    grower.start()
    grower._thread.join()
    with grower._lock:
        news = list(grower._news)
    last = grower.poll_finished()
    assert last == news[-1]
    assert grower.poll_finished() is None
    grower.close()
    blocks = os.fstat(arena.payload_fd).st_blocks * 512
    assert blocks >= last.backed_bytes or "allocate" in more
    return news


def test_memory_comes_in_steps_to_the_full_size():
    news = grow(16384 + 100)
    assert [each.backed_bytes for each in news] == [4096, 8192, 12288, 16384, 16484]
    assert [each.is_finished for each in news] == [False] * 4 + [True]
    assert news[-1].reason is None


def test_what_does_not_fit_is_one_clear_line_and_a_smaller_tier():
    (first, last) = grow(16384, room=[5000, 100])
    assert (first.backed_bytes, last.backed_bytes, last.is_finished) == (4096, 4096, True)
    assert last.reason is not None
    assert "instead of" in last.reason
    assert "\n" not in last.reason


def test_a_refusal_of_the_system_ends_the_growth():
    def refuse(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    (only,) = grow(16384, allocate=refuse)
    assert only.backed_bytes == 0
    assert "No space left" in str(only.reason)


def test_growing_twice_over_the_same_payload_keeps_it():
    arena = HostArena.create(SHAPE)
    arena.payload[2] = 9
    grower = ArenaGrower(arena.payload_fd, HEADER_BYTES, SHAPE.payload_bytes, room=lambda: 1 << 30)
    grower.start()
    grower._thread.join()
    grower.close()
    assert (arena.payload[2] == np.uint8(9)).all()
