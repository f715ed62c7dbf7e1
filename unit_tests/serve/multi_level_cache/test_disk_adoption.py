"""A start waits for nobody to read the index: pages are served as they become known, stores come after all of them."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from serve.multi_level_cache.disk_adoption import CHUNK
from serve.multi_level_cache.disk_index import DiskIndex, ObjectRow, SegmentRow
from serve.multi_level_cache.disk_room import DiskOptions
from serve.multi_level_cache.disk_tier import DiskTier
from serve.multi_level_cache.page_state import PageKey
from unit_tests.serve.multi_level_cache.builders import FORMATS, page_name
from unit_tests.serve.multi_level_cache.test_disk_tier import SPACE

SLOTS = 1 << 13
NUM_PAGES = 3 * CHUNK + 500


def fill_index(directory: Path, num_pages: int) -> None:
    """Rows of pages whose bytes nobody has written; page 0 was used last."""
    index = DiskIndex(directory)
    for number in range(1, -(-num_pages // SLOTS) + 1):
        index.add_segment(SegmentRow(number, SPACE, 4096, SLOTS))
    index.change([], [])
    sums = np.zeros(2, np.uint64).tobytes()
    rows = [
        ObjectRow(1 + page // SLOTS, page % SLOTS, PageKey(page_name(page), "full"), root_of(page), sums, 1e9 - page)
        for page in range(num_pages)
    ]
    index.change(rows, [])
    index.close()


def root_of(page: int) -> bytes:
    return bytes([page % 4]) * 32


class Gate:
    """Lets so many rows through, then waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
        self.opened = threading.Event()
        real = DiskIndex.newest_objects

        def gated(index: DiskIndex, namespace: bytes) -> Iterator[ObjectRow]:
            for position, row in enumerate(real(index, namespace)):
                if position == num_rows:
                    self.opened.wait(30)
                yield row

        monkeypatch.setattr(DiskIndex, "newest_objects", gated)


def start(directory: Path) -> DiskTier:
    tier = DiskTier(DiskOptions(directory, 1 << 30), FORMATS)
    tier.serve_namespace(SPACE)
    return tier


def poll_until(tier: DiskTier, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < deadline
        assert tier.poll_finished() == []
        time.sleep(0.001)


def has(tier: DiskTier, *pages: int) -> list[bool]:
    return tier.contains([PageKey(page_name(page), "full") for page in pages])


def test_pages_are_served_before_all_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill_index(tmp_path, NUM_PAGES)
    gate = Gate(monkeypatch, 2 * CHUNK)
    tier = start(tmp_path)
    assert has(tier, 0, NUM_PAGES - 1) == [False, False], "the start did not wait"
    poll_until(tier, lambda: tier.capacity().num_objects == 2 * CHUNK)
    assert has(tier, 0, 2 * CHUNK - 1, 2 * CHUNK) == [True, True, False], "the newest come first"
    assert not tier.can_accept(4096), "a slot could be one of a page that is not known yet"
    assert not tier.is_adopted
    gate.opened.set()
    poll_until(tier, lambda: tier.is_adopted)
    assert has(tier, 0, NUM_PAGES - 1) == [True, True]
    assert tier.can_accept(4096)
    assert tier.check_integrity() == []
    assert [each.key.name for each in tier._space.oldest(4096, 2)] == [page_name(NUM_PAGES - 1 - n) for n in range(2)]
    tier.close(10)


def test_one_poll_takes_one_piece(tmp_path: Path):
    fill_index(tmp_path, NUM_PAGES)
    tier = start(tmp_path)
    time.sleep(0.5)
    known = []
    while not tier.is_adopted:
        tier.poll_finished()
        known.append(tier.capacity().num_objects)
    steps = {later - earlier for earlier, later in zip([0, *known], known, strict=False)}
    assert steps <= {0, CHUNK, NUM_PAGES % CHUNK}
    tier.close(10)


@pytest.mark.parametrize("root", [None, 2])
def test_a_flush_meets_pages_that_are_not_known_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: int | None):
    fill_index(tmp_path, NUM_PAGES)
    gate = Gate(monkeypatch, CHUNK)
    tier = start(tmp_path)
    poll_until(tier, lambda: tier.capacity().num_objects == CHUNK)
    tier.evict_root(root_of(root) if root is not None else None)
    assert tier.num_leaving()
    gate.opened.set()
    poll_until(tier, lambda: tier.is_adopted and not tier.num_leaving())
    left = [page for page in range(NUM_PAGES) if root is not None and page % 4 != root]
    assert tier.capacity().num_objects == len(left)
    for segment in tier._space.segments.values():
        assert len(segment.free) + len(segment.objects) == segment.row.num_slots
    tier.close(10)
    again = start(tmp_path)
    poll_until(again, lambda: again.is_adopted)
    assert again.capacity().num_objects == len(left)
    again.close(10)


def test_a_page_used_while_the_rest_comes_is_not_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill_index(tmp_path, 2 * CHUNK)
    gate = Gate(monkeypatch, CHUNK)
    tier = start(tmp_path)
    poll_until(tier, lambda: tier.capacity().num_objects == CHUNK)
    tier.touch([PageKey(page_name(CHUNK - 1), "full")])
    gate.opened.set()
    poll_until(tier, lambda: tier.is_adopted)
    order = [each.key.name for each in tier._space.oldest(4096, 2 * CHUNK)]
    assert (order[0], order[-1]) == (page_name(2 * CHUNK - 1), page_name(CHUNK - 1))
    tier.close(10)
