"""The contract of copy engines, by the engine of the CPU: bytes, sums, order and what an interruption leaves."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from serve.model_infer.copy_engine import Batch, CopyEngine, PartSums, page_part, slot_part
from serve.model_infer.host_pages import Piece
from serve.model_infer.page_runs import PageObject, PageRun
from serve.model_infer.transfer import Direction
from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from unit_tests.serve.model_infer.staging_bench import Bench, Rank

NAMES = [bytes([number]) * 32 for number in (1, 2, 3)]


@dataclass
class Place:
    """A rank with an engine, and three pages to move: two that follow each other on both sides, and one elsewhere."""

    bench: Bench
    rank: Rank
    engine: CopyEngine

    def batch(self) -> Batch:
        pages = self.rank.parts.groups["full"]
        objects = [PageObject(4, (8,), (0,)), PageObject(5, (9,), (0,)), PageObject(20, (2,), (0,))]
        seeds = unit_seeds(NAMES, 0, pages.format.unit_bytes)
        stop = np.zeros(1, dtype=np.uint8)
        return Batch(pages.pool, self.bench.arena.payload, objects, objects, pages.stores, seeds, stop)

    def unit_bytes(self) -> tuple[int, ...]:
        return tuple(self.rank.parts.groups["full"].format.unit_bytes)


@pytest.fixture
def place() -> Iterator[Place]:
    bench = Bench()
    rank = bench.rank(is_sync=True)
    yield Place(bench, rank, rank.parts.movers[Direction.STORE].engine)
    bench.close()


def whole(parts: list[PartSums], shape: tuple[int, int]) -> np.ndarray:
    """Sums [objects, units]; each must be given once."""
    sums, times = np.zeros(shape, dtype=np.uint64), np.zeros(shape, dtype=int)
    for part in parts:
        sums[part.rows, part.columns] = part.read()
        times[part.rows, part.columns] += 1
    assert (times == 1).all()
    return sums


def expected_sums(batch: Batch, unit_bytes: tuple[int, ...]) -> np.ndarray:
    pool = batch.pool.numpy()
    pairs = zip(batch.objects, batch.seeds, strict=True)
    return np.stack([object_checksums(pool[each.page], unit_bytes, seeds) for each, seeds in pairs])


def test_pages_go_out_to_their_slots_with_sums_of_the_device_s_bytes(place: Place):
    batch = place.batch()
    with place.engine.context():
        place.engine.wait(place.engine.make_fence())
        parts = place.engine.move_out(batch)
        place.engine.finish()
    size = place.rank.pool.shape[1]
    for page, slot in ((4, 8), (5, 9), (20, 2)):
        assert (place.bench.arena.payload[slot, :size] == batch.pool[page].numpy()).all()
    assert (whole(parts, batch.seeds.shape) == expected_sums(batch, place.unit_bytes())).all()


def test_pages_come_in_from_their_slots_and_are_summed_where_they_are(place: Place):
    batch = place.batch()
    size = place.rank.pool.shape[1]
    fresh = np.random.default_rng(0).integers(0, 256, (3, size), dtype=np.uint8)
    for content, slot in zip(fresh, (8, 9, 2), strict=True):
        place.bench.arena.payload[slot, :size] = content
    others = batch.pool[[3, 6, 19, 21]].clone()
    parts = place.engine.move_in(batch)
    place.engine.finish()
    assert (batch.pool[[4, 5, 20]].numpy() == fresh).all()
    assert torch.equal(batch.pool[[3, 6, 19, 21]], others)
    assert (whole(parts, batch.seeds.shape) == expected_sums(batch, place.unit_bytes())).all()


def test_a_page_that_is_not_copied_is_summed_all_the_same(place: Place):
    """So that a fault, injected in between, is found."""
    batch = place.batch()
    batch = replace(batch, copied=[batch.objects[0], batch.objects[2]])
    place.bench.arena.payload[9] = 7
    parts = place.engine.move_out(batch)
    place.engine.finish()
    assert (place.bench.arena.payload[9] == 7).all()
    assert (whole(parts, batch.seeds.shape) == expected_sums(batch, place.unit_bytes())).all()


def test_sums_without_a_copy_are_the_same(place: Place):
    batch = place.batch()
    parts = place.engine.sum_pages(batch)
    place.engine.finish()
    assert (whole(parts, batch.seeds.shape) == expected_sums(batch, place.unit_bytes())).all()


def test_parts_of_a_run_are_views_of_each_page_and_slot():
    pool = torch.arange(40, dtype=torch.uint8).view(5, 8)
    host = np.zeros((9, 6), dtype=np.uint8)
    run = PageRun(first_page=2, slots=(3, 4), count=2)  # two slots an object: 3 and 4, then 5 and 6
    piece = Piece(slot_index=1, slot_offset=2, page_offset=6, length=2)
    device = page_part(pool, run, piece)
    assert device.tolist() == [[22, 23], [30, 31]]
    slot_part(host, run, piece)[:] = device.numpy()
    assert host[[4, 6], 2:4].tolist() == [[22, 23], [30, 31]]
    assert host.sum() == 22 + 23 + 30 + 31
