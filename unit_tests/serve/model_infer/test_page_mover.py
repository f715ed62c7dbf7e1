"""Bytes: any split over ranks can be read at any other, and whatever is damaged is found before it is used."""

import numpy as np
import pytest
import torch

from serve.types import JobResult
from unit_tests.serve.model_infer.staging_bench import Bench, make_layout

DONE, FAILED = JobResult.DONE, JobResult.FAILED


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5])
@pytest.mark.parametrize(("tp_out", "tp_in"), [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("small_slots", [False, True])
def test_pages_written_at_one_tp_size_are_read_at_another(
    num_kv_heads: int, tp_out: int, tp_in: int, small_slots: bool
):
    """small_slots: an object takes three slots, cut across heads."""
    layout = make_layout(num_kv_heads)
    object_bytes = layout.groups[0].bytes_per_page
    slot_bytes = object_bytes // 3 + 8 if small_slots else None
    bench = Bench(layout, 24, slot_bytes)
    step = 3 if small_slots else 1
    slots = [slot for page in (2, 0, 1) for slot in range(page * step, page * step + step)]
    for first in range(0, 3 * step, step):
        bench.headers.assign(range(first, first + step), bytes([first + 1]) * 32)
    writers = [bench.rank(tp=tp_out, rank=rank, is_sync=True) for rank in range(tp_out)]
    readers = [bench.rank(tp=tp_in, rank=rank, is_sync=True) for rank in range(tp_in)]
    whole = torch.randint(0, 256, (3, num_kv_heads, object_bytes // num_kv_heads), dtype=torch.uint8)
    for writer, (first, last) in zip(writers, held_heads(num_kv_heads, tp_out), strict=True):
        writer.pool[4:7] = whole[:, first:last].flatten(1)
        assert writer.store([4, 5, 6], slots) is DONE
    for reader, (first, last) in zip(readers, held_heads(num_kv_heads, tp_in), strict=True):
        assert reader.answer_of(reader.send_load([9, 1, 2], slots)) == (DONE, "", [])
        assert torch.equal(reader.pool[[9, 1, 2]], whole[:, first:last].flatten(1))
    bench.close()


def held_heads(num_kv_heads: int, tp: int) -> list[tuple[int, int]]:
    """Heads that each rank needs, by the rule of `shard_heads` in other words."""
    if tp <= num_kv_heads:
        return [(int(part[0]), int(part[-1]) + 1) for part in np.array_split(np.arange(num_kv_heads), tp)]
    return [(head, head + 1) for head, part in enumerate(np.array_split(range(tp), num_kv_heads)) for _ in part]


@pytest.mark.parametrize("damage", ["payload", "checksum", "name"])
def test_damage_is_found_and_named(bench: Bench, damage: str):
    rank = bench.rank()
    pages, slots = [1, 2, 3, 4], [10, 11, 12, 20]
    assert rank.store(pages, slots) is DONE
    table = getattr(bench.arena, damage)
    position = {"payload": (12, 77), "checksum": (12, 1), "name": (12, 3)}[damage]
    table[position] ^= table.dtype.type(1)
    job = rank.send_load([21, 22, 23, 24], slots)
    assert rank.answer_of(job) == (FAILED, "1 of 4 pages do not match their checksums", [12])
    table[position] ^= table.dtype.type(1)
    assert rank.load([21, 22, 23, 24], slots) is DONE


def test_a_reused_slot_fails_and_is_not_called_bad(bench: Bench):
    rank = bench.rank()
    assert rank.store([1, 2], [1, 2]) is DONE
    old = bench.arena.generation[[1, 2]].tolist()
    bench.assign(2)
    assert rank.answer_of(rank.send_load([5, 6], [1, 2], old)) == (FAILED, "host slot 2 has been reused", [])
    before = bench.arena.payload.copy()
    assert rank.answer_of(rank.send_store([7, 8], [1, 2], old)) == (FAILED, "host slot 2 has been reused", [])
    assert (bench.arena.payload == before).all()
    assert not bench.arena.checksum[2].any()


def test_a_slot_that_is_reused_during_the_copy_is_noticed(bench: Bench):
    rank = bench.rank(is_sync=True)
    assert rank.store([1], [1]) is DONE
    old = bench.arena.generation[[1]].tolist()
    for mover in rank.parts.movers.values():
        finish = mover.engine.finish

        def reuse_then_finish(finish=finish) -> None:
            bench.assign(1)
            finish()

        mover.engine.finish = reuse_then_finish
    assert rank.answer_of(rank.send_load([5], [1], old)) == (FAILED, "host slot 1 has been reused", [])
    old = bench.arena.generation[[1]].tolist()
    assert rank.answer_of(rank.send_store([5], [1], old)) == (FAILED, "host slot 1 has been reused", [])
    assert not bench.arena.checksum[1].any(), "the next owner's header is left alone"


@pytest.mark.parametrize(
    "fault",
    ["host.copy_out:bitflip:n=2", "host.copy_out:drop:n=2", "host.copy_in:bitflip:n=2", "host.copy_in:drop:n=2"],
)
def test_injected_damage_is_caught_at_the_load(bench: Bench, fault: str):
    rank = bench.rank(faults=fault)
    assert rank.store([1, 2, 3], [1, 2, 3]) is DONE
    result, _, bad_slots = rank.answer_of(rank.send_load([11, 12, 13], [1, 2, 3]))
    assert (result, bad_slots) == (FAILED, [2])
    site, action, _ = fault.split(":")
    assert rank.engine.statistics()["faults"] == {f"{site}:{action}": 1}


def test_zeros_of_a_slot_that_was_never_filled_do_not_pass(bench: Bench):
    rank = bench.rank()
    assert rank.answer_of(rank.send_load([1], [1]))[::2] == (FAILED, [1])


def test_long_jobs_go_in_batches(bench: Bench):
    rank = bench.rank()
    for mover in rank.parts.movers.values():
        mover.engine.batch_bytes = 3 * rank.pool.shape[1] + 5
    slots = list(range(10))
    assert rank.store(slots, slots) is DONE
    assert rank.load(list(range(20, 30)), slots) is DONE
    assert torch.equal(rank.pool[20:30], rank.pool[:10])
