"""Where states are kept, and which of them get a name."""

import pytest

from models.state_layout import HitPolicy
from serve.router.checkpoints import Checkpointer
from serve.router.ledger import StateLedger
from serve.router.prefix_index import GroupSpec
from serve.router.statistics import RouterStatistics
from serve.router.step_plan import PlanBuilder
from serve.types import FinishReason
from unit_tests.serve.router.test_request import make_request

PAGE = 16
NAMES = [bytes([place]) * 32 for place in range(20)]


class Bench:
    """A request with its pages, and plans to put snapshots into."""

    def __init__(self, num_pages: int = 8, interval: int = 1000, num_tokens: int = 100) -> None:
        specs = (GroupSpec("state", HitPolicy.EXACT_CHECKPOINT), GroupSpec("tail", HitPolicy.EXACT_CHECKPOINT))
        self.ledger = StateLedger(specs, {"state": num_pages, "tail": num_pages}, PAGE)
        self.statistics = RouterStatistics()
        self.checkpoints = Checkpointer(self.ledger, interval, self.statistics)
        self.request = make_request(num_prompt=num_tokens)
        self.request.names = NAMES[: num_tokens // PAGE]
        self.request.row = 5
        self.request.holding = self.ledger.open()
        self.ledger.reserve(self.request.holding, {"state": 3, "tail": 3})
        self.checkpoints.begin(self.request, self.checkpoints.due(num_tokens, 0, 0))

    def compute(self, upto: int) -> PlanBuilder:
        plan = PlanBuilder(1, 0)
        self.request.num_scheduled = upto
        self.checkpoints.computed_chunk(plan, self.request)
        return plan

    def refresh(self, upto: int) -> PlanBuilder:
        plan = PlanBuilder(1, 0)
        self.request.num_scheduled = upto
        self.checkpoints.refresh(plan, self.request)
        return plan

    def has(self, place: int) -> list[bool]:
        return [NAMES[place] in group.index for group in self.ledger.groups.values()]


def test_states_are_kept_at_intervals_the_last_boundary_and_where_another_went_on():
    bench = Bench(interval=40)  # three pages
    due = bench.checkpoints.due
    assert due(100, 0, 0) == [48, 96]
    assert due(100, 48, 5) == [80, 96]
    assert due(96, 0, 0) == [48, 80]  # the same prompt can use no more than 80 tokens
    assert due(97, 96, 0) == []
    assert due(10, 0, 0) == []
    assert due(200, 100, 0) == [144, 192]


def test_a_model_without_such_states_keeps_none():
    ledger = StateLedger((GroupSpec("full"),), {"full": 4}, PAGE)
    checkpoints = Checkpointer(ledger, 16, RouterStatistics())
    assert not checkpoints
    assert checkpoints.due(100, 0, 0) == []


def test_the_last_boundary_uses_the_pages_that_were_taken_for_it():
    bench = Bench()
    plan = bench.compute(96)
    snapshots = plan.build([], []).snapshots
    assert [(row, group) for row, group, _ in snapshots] == [(5, "state"), (5, "tail")]
    assert bench.has(5) == [True, True]
    assert [len(pages) for pages in bench.request.holding.pages.values()] == [2, 2]
    assert all(page in plan.holding.pages[group] for _, group, page in snapshots)
    bench.ledger.release(plan.holding)
    assert bench.ledger.groups["state"].num_cached == 1
    assert bench.statistics.num_snapshots == 1
    assert bench.ledger.check_integrity() == []


def test_other_boundaries_take_pages_of_their_own_in_all_groups_or_none():
    bench = Bench(num_pages=4, interval=16)
    plan = bench.compute(16)
    assert bench.has(0) == [True, True]
    assert len(bench.request.holding.pages["state"]) == 3
    skipped = bench.compute(32)  # one page was left in each pool
    assert (bench.has(1), skipped.build([], []).snapshots) == ([False, False], [])
    assert bench.statistics.num_snapshots_skipped == 1
    bench.ledger.release(plan.holding)
    bench.compute(48)  # the first is idle now, and goes for it
    assert (bench.has(0), bench.has(2)) == ([False, False], [True, True])
    assert bench.ledger.check_integrity() == []


def test_only_groups_that_lack_a_checkpoint_get_one():
    bench = Bench()
    bench.ledger.release(bench.compute(96).holding)
    bench.ledger.forget("tail", bench.ledger.groups["tail"].index.page(NAMES[5]))
    again = bench.request
    again.holding = bench.ledger.open()
    bench.ledger.reserve(again.holding, {"state": 3, "tail": 3})
    bench.checkpoints.begin(again, [96])
    plan = bench.compute(96).build([], [])
    assert [group for _, group, _ in plan.snapshots] == ["tail"]
    assert bench.has(5) == [True, True]


def test_a_chunk_that_ends_elsewhere_keeps_nothing():
    bench = Bench(interval=32)
    assert bench.request.checkpoints_due == [32, 64, 96]
    assert bench.compute(40).build([], []).snapshots == []
    assert bench.request.checkpoints_due == [64, 96]


def test_decoding_refreshes_one_page_that_is_named_in_the_end():
    bench = Bench()
    first, second = bench.refresh(96), bench.refresh(112)
    assert bench.refresh(113).build([], []).snapshots == []
    assert first.build([], []).snapshots == second.build([], []).snapshots
    assert first.holding is None
    assert bench.has(6) == [False, False]
    bench.request.names = NAMES[:7]
    assert bench.checkpoints.settle(bench.request) == 6
    assert (bench.has(5), bench.has(6)) == ([False, False], [True, True])
    assert bench.checkpoints.settle(bench.request) is None


@pytest.mark.parametrize("reason", list(FinishReason))
def test_only_good_ends_leave_a_state(reason: FinishReason):
    bench = Bench()
    bench.refresh(96)
    bench.request.finish_reason = reason
    is_good = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert bench.checkpoints.settle(bench.request) == (5 if is_good else None)
    bench.ledger.release(bench.request.holding)
    assert bench.ledger.groups["state"].num_used == 0


def test_a_state_beyond_what_was_accepted_is_not_kept():
    bench = Bench()
    bench.refresh(96)
    bench.checkpoints.cut(bench.request, 5)
    assert bench.checkpoints.settle(bench.request) is None
    bench.refresh(96)
    bench.checkpoints.cut(bench.request, 6)
    assert bench.checkpoints.settle(bench.request) == 5
