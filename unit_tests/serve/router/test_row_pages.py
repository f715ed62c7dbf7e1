"""Pages of running requests: what they take, leave behind, tell the index, and give back."""

import pytest

from models.state_layout import HitPolicy
from serve.router.admission import Admission, AdmissionLimits
from serve.router.ledger import StateLedger
from serve.router.page_needs import PageNeeds
from serve.router.prefix_index import GroupSpec
from serve.router.request import Request
from serve.router.row_pages import RowPages
from serve.router.step_plan import PlanBuilder
from unit_tests.serve.router.test_request import make_request

PAGE = 16
CHUNK = 32
NAMES = [bytes([place]) * 32 for place in range(20)]
SPECS = (
    GroupSpec("full"),
    GroupSpec("window", HitPolicy.TRAILING_PAGES, 2),
    GroupSpec("state", HitPolicy.EXACT_CHECKPOINT),
)


class Bench:
    """One request that joins with nothing cached, and the plans that carry it on."""

    def __init__(self, num_prompt: int = 100, max_tokens: int = 60, specs: tuple[GroupSpec, ...] = SPECS) -> None:
        num_pages = {spec.name: 30 for spec in specs}
        self.ledger = StateLedger(specs, num_pages, PAGE)
        admission = Admission(AdmissionLimits(1000, 10), PAGE)
        self.pages = RowPages(self.ledger, PageNeeds(specs, num_pages, PAGE, CHUNK, admission))
        self.request = self._make(num_prompt, max_tokens)
        self.pages.join(self.request)

    def _make(self, num_prompt: int, max_tokens: int) -> Request:
        request = make_request(num_prompt=num_prompt)
        request.limit, request.row = num_prompt + max_tokens, 3
        request.names = NAMES[: num_prompt // PAGE]
        request.holding = self.ledger.acquire(self.ledger.match([], 1))
        return request

    def compute(self, count: int) -> PlanBuilder:
        """A plan that computes the next `count` tokens."""
        plan = PlanBuilder(1, 0)
        self.pages.extend(plan, self.request, count)
        self.request.num_scheduled += count
        self.pages.publish_ready(self.request)
        self.pages.leave_windows(plan, self.request)
        assert self.ledger.check_integrity() == []
        return plan

    def end(self, plan: PlanBuilder) -> None:
        if plan.holding is not None:
            self.ledger.release(plan.holding)

    def held(self) -> dict[str, int]:
        return {group: len(pages) for group, pages in self.request.holding.pages.items()}


def test_a_request_joins_with_pages_of_all_groups():
    bench = Bench()
    assert bench.held() == {"full": 7, "window": 3, "state": 3}
    assert bench.pages.growth.total == {"full": 2, "window": 6, "state": 0}
    assert bench.pages.capacity(bench.request) == 3 * PAGE


def test_window_pages_come_with_each_chunk_and_go_with_its_end():
    bench = Bench()
    assert bench.compute(32).build([], []).new_pages == []  # it joined with these
    plan = bench.compute(32)
    assert [(row, group, len(pages)) for row, group, pages in plan.build([], []).new_pages] == [(3, "window", 1)]
    assert (bench.request.holding.first("window"), bench.held()["window"]) == (2, 2)
    assert len(plan.holding.pages["window"]) == 2
    assert bench.ledger.groups["window"].num_used == 4
    bench.end(plan)
    assert bench.ledger.groups["window"].num_used == 2
    assert bench.ledger.groups["window"].num_cached == 2  # and still found by their names
    assert bench.ledger.check_integrity() == []


def test_what_left_the_window_is_named_and_what_is_in_it_too():
    bench = Bench()
    bench.end(bench.compute(32))
    bench.end(bench.compute(64))
    for group in ("full", "window"):
        assert [name in bench.ledger.groups[group].index for name in NAMES[:7]] == [True] * 6 + [False]


def test_a_decoding_row_gets_a_place_in_every_group_that_has_places():
    bench = Bench(num_prompt=32)
    plan = bench.compute(32)
    bench.pages.grant(plan, bench.request, 1)
    assert {group: len(pages) for _, group, pages in plan.build([], []).new_pages} == {"full": 1, "window": 1}
    assert bench.pages.capacity(bench.request) == 48
    assert bench.held() == {"full": 3, "window": 3, "state": 3}


def test_a_window_is_expected_to_want_no_more_than_a_page_while_decoding():
    bench = Bench(num_prompt=96, max_tokens=300)
    for _ in range(3):
        bench.end(bench.compute(32))
    assert bench.request.growth["window"] == 1
    for _ in range(4):
        plan = PlanBuilder(1, 0)
        bench.pages.grant(plan, bench.request, 1)
        assert bench.request.growth["window"] == 0
        bench.request.num_scheduled += PAGE
        bench.pages.leave_windows(plan, bench.request)
        bench.end(plan)
        assert (bench.request.growth["window"], bench.held()["window"]) == (1, 2)
    bench.pages.growth.end(bench.request)
    assert not any(bench.pages.growth.total.values())


def test_a_request_that_is_released_leaves_only_named_pages():
    bench = Bench()
    bench.end(bench.compute(32))
    bench.pages.release(bench.request)
    assert {name: group.num_used for name, group in bench.ledger.groups.items()} == dict.fromkeys(
        bench.ledger.groups, 0
    )
    assert {name: group.num_cached for name, group in bench.ledger.groups.items()} == {
        "full": 2,
        "window": 2,
        "state": 0,
    }
    bench.pages.release(bench.request)  # nothing is given back twice


@pytest.mark.parametrize("even_if_shared", [False, True])
def test_pages_from_a_place_on_are_forgotten(even_if_shared: bool):
    bench = Bench()
    for _ in range(3):
        bench.end(bench.compute(32))
    bench.pages.forget(bench.request, 1, even_if_shared)
    found = {name: [each in group.index for each in NAMES[:6]] for name, group in bench.ledger.groups.items()}
    assert found["full"] == [True] + [False] * 5
    left_the_window = [True, not even_if_shared, not even_if_shared, not even_if_shared]
    assert found["window"] == [*left_the_window, False, False]
    assert bench.ledger.check_integrity() == []


def test_pages_that_another_uses_stay_unless_told_otherwise():
    bench = Bench(specs=SPECS[:1])
    bench.end(bench.compute(64))
    other = bench.ledger.acquire(bench.ledger.match(NAMES[:3], 1000))
    bench.pages.forget(bench.request, 0, even_if_shared=False)
    assert [name in bench.ledger.groups["full"].index for name in NAMES[:4]] == [True, True, True, False]
    bench.pages.forget(bench.request, 0, even_if_shared=True)
    assert len(bench.ledger.groups["full"].index) == 0
    bench.ledger.release(other)
    assert bench.ledger.check_integrity() == []


def test_nothing_of_a_flushed_request_is_named_where_it_would_be_a_hit_alone():
    bench = Bench()
    bench.request.is_flushed = True
    bench.end(bench.compute(64))
    assert (len(bench.ledger.groups["full"].index), len(bench.ledger.groups["window"].index)) == (4, 0)
