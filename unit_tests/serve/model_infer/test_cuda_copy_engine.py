"""The same promises on a GPU; the host side of the CUDA engine is tested anywhere."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serve.model_infer import cuda_copy_engine
from serve.model_infer.cuda_copy_engine import LockedSlots
from serve.model_infer.page_runs import PageObject
from serve.model_infer.staging_setup import make_parts, rank_pages
from serve.model_infer.transfer import Direction, Transfer
from serve.types import JobId, JobResult
from unit_tests.serve.model_infer.staging_bench import Bench, make_layout, random_pool


class FakeCudart:
    """Notes registrations; refuses those that start at `refused`."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address == self.refused:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_slots_are_locked_in_steps_once_and_given_back(monkeypatch: pytest.MonkeyPatch):
    cudart = FakeCudart()
    monkeypatch.setattr(cuda_copy_engine, "_cudart", lambda: cudart)
    monkeypatch.setattr(cuda_copy_engine, "_LOCK_STEP_BYTES", 4 * 4096 + 100)
    host = np.zeros((10, 4096), dtype=np.uint8)
    locked = LockedSlots(host)
    locked.require(3, 5)
    locked.require(4, 9)
    base = host.ctypes.data
    assert cudart.locked == {base: 4 * 4096, base + 4 * 4096: 4 * 4096, base + 8 * 4096: 2 * 4096}
    assert locked.is_one_registration(4, 7)
    assert not locked.is_one_registration(3, 4)
    locked.close()
    assert cudart.locked == {}


def test_locking_in_the_background_follows_the_memory_that_is_there(monkeypatch: pytest.MonkeyPatch):
    cudart = FakeCudart()
    monkeypatch.setattr(cuda_copy_engine, "_cudart", lambda: cudart)
    monkeypatch.setattr(cuda_copy_engine, "_LOCK_STEP_BYTES", 4 * 4096)
    host = np.zeros((10, 4096), dtype=np.uint8)
    backed = 4 * 4096
    locked = LockedSlots(host)
    locked.follow(lambda: backed)
    base, deadline = host.ctypes.data, time.monotonic() + 20
    while base not in cudart.locked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert list(cudart.locked) == [base]  # the rest has no memory yet
    backed = host.nbytes
    while len(cudart.locked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cudart.locked == {base: 4 * 4096, base + 4 * 4096: 4 * 4096, base + 8 * 4096: 2 * 4096}
    locked.close()
    assert cudart.locked == {}


def test_what_cannot_be_locked_is_tried_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    host = np.zeros((2, 4096), dtype=np.uint8)
    monkeypatch.setattr(cuda_copy_engine, "_cudart", lambda: FakeCudart(host.ctypes.data))
    locked = LockedSlots(host)
    locked.require(0, 1)
    locked.require(0, 1)
    assert len([line for line in caplog.messages if "cannot be page-locked" in line]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_pages_come_back_on_a_gpu(tp: int, rank: int):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    bench = Bench(make_layout(3, page_size=64, head_dim=64))
    bench.assign(*range(32))
    page_bytes = bench.rank(tp=tp, rank=rank).pool.shape[1]
    pool = random_pool(32, page_bytes, seed=5).cuda()
    before = pool.clone()
    parts = make_parts(bench.arena, rank_pages(bench.layout, {"full": pool}, bench.arena.shape.slot_bytes, tp, rank))
    pages, slots = [1, 2, 3, 9], [4, 5, 6, 1]
    outcomes = []
    for direction, targets in [(Direction.STORE, pages), (Direction.LOAD, [20, 21, 22, 30])]:
        mover = parts.movers[direction]
        objects = [
            PageObject(page, (slot,), (int(bench.arena.generation[slot]),))
            for page, slot in zip(targets, slots, strict=True)
        ]
        transfer = Transfer(JobId(1, 1), direction, parts.groups["full"], objects, fence=mover.engine.make_fence())
        outcomes.append(mover.run(transfer))
    assert [outcome.result for outcome in outcomes] == [JobResult.DONE] * 2, outcomes
    assert torch.equal(pool[[20, 21, 22, 30]], before[pages])
    for mover in parts.movers.values():
        mover.engine.close()
    bench.close()


def test_parts_are_contiguous_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    """Whole pages in neighbouring slots are one copy; a head of each is a copy a page."""
    from serve.model_infer.page_runs import PageRun

    monkeypatch.setattr(cuda_copy_engine, "_cudart", lambda: FakeCudart())
    for tp, expected in ((1, 1), (2, 3)):
        bench = Bench(make_layout(2, page_size=64, head_dim=64))
        engine = bench.rank(tp=tp)
        pages = engine.parts.groups["full"]
        assert bench.arena.shape.slot_bytes == pages.format.object_bytes
        copies = cuda_copy_engine.CudaCopyEngine._parts(
            SimpleNamespace(_locked=LockedSlots(bench.arena.payload)),  # type: ignore[arg-type]
            engine.pool,
            bench.arena.payload,
            PageRun(4, (8,), 3),
            pages.loads.pieces,
        )
        assert len(copies) == expected
        assert all(device.is_contiguous() and host.is_contiguous() for device, host in copies)
        bench.close()
