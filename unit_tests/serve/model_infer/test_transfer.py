"""Jobs out of messages: what is copied, in which batches, and what no job may be."""

from collections.abc import Iterator

import pytest

from serve.ipc.messages import LoadPages, StorePages
from serve.model_infer.page_runs import PageObject
from serve.model_infer.transfer import BadJobError, Direction, Transfer, make_transfer
from serve.types import JobId
from unit_tests.serve.model_infer.staging_bench import Bench, make_layout

JOB = JobId(1, 7)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def transfer_of(bench: Bench, message: LoadPages | StorePages, **options: object) -> Transfer:
    rank = bench.ranks[0] if bench.ranks else bench.rank(**options)
    return make_transfer(message, rank.parts.groups, bench.arena)


def store(pages: list[int], slots: list[int], generations: list[int] | None = None, group: str = "full") -> StorePages:
    return StorePages(JOB, group, pages, slots, [0] * len(slots) if generations is None else generations, 5)


def load(pages: list[int], slots: list[int], first_layer: int = 0, last_layer: int = 99) -> LoadPages:
    return LoadPages(JOB, "full", pages, slots, [0] * len(slots), first_layer, last_layer)


def test_a_store_names_its_pages_and_the_step_it_waits_for(bench: Bench):
    found = transfer_of(bench, store([3, 9], [1, 0], [11, 12]))
    assert (found.job, found.direction, found.after_step) == (JOB, Direction.STORE, 5)
    assert found.objects == [PageObject(3, (1,), (11,)), PageObject(9, (0,), (12,))]
    assert found.slots == [1, 0]


def test_a_load_waits_for_no_step(bench: Bench):
    found = transfer_of(bench, load([3], [1]))
    assert (found.direction, found.after_step) == (Direction.LOAD, None)


def test_an_object_of_several_slots_has_them_in_order():
    layout = make_layout(3)
    bench = Bench(layout, 24, layout.groups[0].bytes_per_page // 3 + 8)
    found = transfer_of(bench, store([3, 4], [5, 0, 2, 7, 8, 9], [1, 2, 3, 4, 5, 6]))
    assert found.objects == [PageObject(3, (5, 0, 2), (1, 2, 3)), PageObject(4, (7, 8, 9), (4, 5, 6))]
    assert found.slots == [5, 0, 2, 7, 8, 9]
    bench.close()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (store([1], [1], group="other"), "no state group 'other'"),
        (store([1, 2], [1]), "2 pages take 2 slots, not 1 with 1 generations"),
        (store([1], [1], [1, 2]), "1 pages take 1 slots, not 1 with 2 generations"),
        (store([32], [1]), "a page or a slot does not exist"),
        (store([-1], [1]), "a page or a slot does not exist"),
        (load([1], [32]), "a page or a slot does not exist"),
        (load([1], [1], first_layer=1), "a job moves whole pages"),
        (load([1], [1], last_layer=1), "a job moves whole pages"),
    ],
)
def test_a_job_that_contradicts_itself_or_this_rank_is_refused(
    bench: Bench, message: LoadPages | StorePages, line: str
):
    with pytest.raises(BadJobError, match=line):
        transfer_of(bench, message)


def test_a_job_without_pages_moves_nothing(bench: Bench):
    found = transfer_of(bench, store([], []))
    assert (found.num_bytes, list(found.batches(100))) == (0, [])


def test_batches_hold_what_fits_and_at_least_a_page(bench: Bench):
    found = transfer_of(bench, store(list(range(7)), list(range(7))))
    page = found.share.num_bytes
    assert found.num_bytes == 7 * page
    for num_bytes, sizes in ((3 * page, [3, 3, 1]), (3 * page - 1, [2, 2, 2, 1]), (1, [1] * 7), (99 * page, [7])):
        batches = list(found.batches(num_bytes))
        assert [len(batch) for batch in batches] == sizes
        assert [each for batch in batches for each in batch] == found.objects


def test_a_rank_stores_its_share_and_loads_what_it_needs():
    """With more ranks than heads both ranks of a head read it, and one writes it."""
    bench = Bench(make_layout(1))
    for rank, stores in ((0, True), (1, False)):
        parts = bench.rank(tp=2, rank=rank).parts
        stored = make_transfer(store([1], [1]), parts.groups, bench.arena)
        loaded = make_transfer(load([1], [1]), parts.groups, bench.arena)
        assert (stored.num_bytes > 0) is stores
        assert loaded.num_bytes == make_layout(1).groups[0].bytes_per_page
    bench.close()


def test_cancelling_is_seen_by_all_who_look(bench: Bench):
    found = transfer_of(bench, store([1], [1]))
    assert not found.is_cancelled
    found.cancel()
    found.cancel()
    assert found.is_cancelled
    assert found.stop[0] != 0
