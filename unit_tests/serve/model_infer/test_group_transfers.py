"""Pages of several groups through host memory at once: places, windows, recurrent states and tails, from one number of
ranks to another."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from models.state_layout import (
    HitPolicy,
    Leaf,
    ShardKind,
    StateGroup,
    StateKind,
    StateLayout,
    rank_extents,
)
from serve.ipc.messages import LoadPages, StorePages
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.staging import StagingEngine
from serve.model_infer.staging_setup import make_parts, rank_pages
from serve.multi_level_cache.object_format import object_formats
from serve.types import JobId, JobResult
from unit_tests.serve.model_infer.builders import CPU
from unit_tests.serve.model_infer.staging_bench import DEADLINE_S, Bench, FakeAnswerer

HEAD, REPLICATED = ShardKind.HEAD, ShardKind.REPLICATED
CHECKPOINT, NUM_PAGES, PAGE = HitPolicy.EXACT_CHECKPOINT, 6, 8
LAYOUT = StateLayout(
    PAGE,
    (
        StateGroup(
            "full",
            StateKind.FULL,
            HitPolicy.ALL_PAGES,
            PAGE,
            (
                Leaf("kv", (0, 3), (2, 16), "float32", HEAD, 3),
                Leaf("index", (3,), (12,), "float32", REPLICATED, 1, tokens_per_row=4),
            ),
        ),
        StateGroup(
            "window",
            StateKind.BOUNDED,
            HitPolicy.TRAILING_PAGES,
            PAGE,
            (Leaf("kv", (1,), (2, 16), "float32", HEAD, 3),),
            window_tokens=11,
        ),
        StateGroup(
            "recurrent",
            StateKind.BOUNDED,
            CHECKPOINT,
            PAGE,
            (
                Leaf("recurrent", (2, 4), (2, 16, 16), "float32", HEAD, 2),
                Leaf("conv", (2, 4), (32, 3), "bfloat16", HEAD, 2),
            ),
        ),
        StateGroup(
            "tail",
            StateKind.TAIL,
            CHECKPOINT,
            PAGE,
            (
                Leaf("overlap", (3, 5), (2, 16), "float32", REPLICATED, 1),
                Leaf("partial", (3, 5), (4, 16), "float32", REPLICATED, 1, is_scratch=True),
            ),
        ),
    ),
)


class Rank:
    """Pools as the coordinator makes them, and a staging engine with threads over them."""

    def __init__(self, bench: Bench, tp: int, rank: int) -> None:
        self.tp, self.rank = tp, rank
        self.states = StateCoordinator(bench.layout, tp, rank, CPU)
        self.states.allocate({group.name: NUM_PAGES for group in bench.layout.groups})
        groups = rank_pages(bench.layout, self.states.pools(), bench.arena.shape.slot_bytes, tp, rank)
        self.answerer = FakeAnswerer()
        self.engine = StagingEngine(make_parts(bench.arena, groups), self.answerer)  # type: ignore[arg-type]

    def part(self, group: StateGroup, objects: torch.Tensor) -> torch.Tensor:
        """What this rank holds of whole objects uint8 [n, bytes]."""
        extents = rank_extents(group, self.tp, self.rank, loading=True)
        return torch.cat([objects[:, each.offset : each.offset + each.length] for each in extents], dim=1)

    def results(self, count: int) -> list[JobResult]:
        """Of so many jobs, once all have been answered."""
        end = time.monotonic() + DEADLINE_S
        while len(self.answerer.answers) < count:
            assert time.monotonic() < end
            self.engine.poll_finished()
            time.sleep(0.001)
        return [result for _, result, _, _ in self.answerer.answers]


@contextmanager
def ranks(bench: Bench, tp: int) -> Iterator[list[Rank]]:
    made = [Rank(bench, tp, rank) for rank in range(tp)]
    yield made
    for each in made:
        each.engine.close()


def slots_by_group(bench: Bench, pages: list[int]) -> dict[str, list[int]]:
    """Slots of so many objects of each group, named by page."""
    found: dict[str, list[int]] = {}
    first = 0
    for form in object_formats(LAYOUT):
        count = form.num_slots(bench.arena.shape.slot_bytes)
        found[form.group] = list(range(first, first + count * len(pages)))
        for index, page in enumerate(pages):
            taken = range(first + index * count, first + (index + 1) * count)
            bench.headers.assign(taken, bytes([page + 1]) * 32)
        first += count * len(pages)
    return found


@pytest.mark.parametrize(("tp_out", "tp_in"), [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (4, 1)])
def test_objects_of_all_groups_written_at_one_tp_size_are_read_at_another(tp_out: int, tp_in: int):
    bench = Bench(LAYOUT, num_slots=64)
    pages, targets = [4, 1, 2], [0, 5, 3]
    slots = slots_by_group(bench, pages)
    generator = torch.Generator().manual_seed(0)
    whole = {
        group.name: torch.randint(0, 256, (3, group.bytes_per_page), dtype=torch.uint8, generator=generator)
        for group in LAYOUT.groups
    }
    with ranks(bench, tp_out) as writers:
        for writer in writers:
            for number, group in enumerate(LAYOUT.groups):
                writer.states.pools()[group.name][pages] = writer.part(group, whole[group.name])
                generations = bench.arena.generation[slots[group.name]].tolist()
                writer.engine.submit(
                    StorePages(JobId(1, number), group.name, pages, slots[group.name], generations, -1)
                )
        for writer in writers:
            assert writer.results(len(LAYOUT.groups)) == [JobResult.DONE] * len(LAYOUT.groups)
    with ranks(bench, tp_in) as readers:
        for reader in readers:
            for number, group in enumerate(LAYOUT.groups):
                generations = bench.arena.generation[slots[group.name]].tolist()
                reader.engine.submit(
                    LoadPages(JobId(2, number), group.name, targets, slots[group.name], generations, 0, 99)
                )
        for reader in readers:
            assert reader.results(len(LAYOUT.groups)) == [JobResult.DONE] * len(LAYOUT.groups)
            for group in LAYOUT.groups:
                found = reader.states.pools()[group.name][targets]
                assert torch.equal(found, reader.part(group, whole[group.name])), group.name
    bench.arena.close()


def test_an_object_of_one_group_is_not_taken_for_one_of_another():
    """Of groups that are alike the checksum tells them apart."""
    leaves = LAYOUT.groups[1].leaves
    alike = (StateGroup(name, StateKind.FULL, HitPolicy.ALL_PAGES, PAGE, leaves) for name in ("full", "draft"))
    bench = Bench(StateLayout(PAGE, tuple(alike)), num_slots=8)
    generations = bench.assign(1)
    with ranks(bench, 1) as (rank,):
        rank.states.pools()["full"][1] = 3
        rank.engine.submit(StorePages(JobId(1, 0), "full", [1], [1], generations, -1))
        assert rank.results(1) == [JobResult.DONE]
        for number, group in enumerate(("full", "draft"), start=1):
            rank.engine.submit(LoadPages(JobId(1, number), group, [2], [1], generations, 0, 99))
            rank.results(number + 1)
        assert [result for _, result, _, _ in rank.answerer.answers[1:]] == [JobResult.DONE, JobResult.FAILED]
    bench.arena.close()
