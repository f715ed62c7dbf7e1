"""What plans carry: joins with all that a row needs, pages just in time, leaves, and nothing where nothing changes."""

from collections.abc import Iterator

import pytest

from serve.types import RequestStatus
from unit_tests.serve.router.router_fakes import PAGE, Harness, prompt_of


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.close()


def test_a_join_names_slot_row_pages_and_what_is_cached(harness: Harness):
    first = harness.submit(prompt_of(40))
    harness.run()
    num_plans = len(harness.plans)
    second = harness.submit(prompt_of(40))
    plan = harness.plans[num_plans]
    (join,) = plan.joins
    assert (join.slot, join.generation, join.num_prompt, join.num_known) == (second.slot, second.generation, 40, 40)
    assert join.num_cached == 2 * PAGE
    assert len(join.pages["full"]) == 3
    assert plan.chunks == [(join.row, 8)]
    harness.run()
    assert second.tokens == first.tokens
    harness.check_idle()


def test_one_plan_is_sent_ahead_and_no_more(harness: Harness):
    harness.submit(prompt_of(8), max_tokens=20)
    assert [plan.step for plan in harness.workers[0].plans] == [harness.plans[0].step, harness.plans[0].step + 1]
    harness.step()
    assert len(harness.workers[0].plans) == 2
    harness.run()


def test_a_steady_decode_step_carries_nothing(harness: Harness):
    harness.submit(prompt_of(PAGE + 1), max_tokens=PAGE - 2)
    harness.run()
    steady = harness.plans[2:-1]
    assert len(steady) > 5
    assert all(not (p.joins or p.leaves or p.new_pages or p.chunks or p.paused) for p in steady)


def test_a_page_comes_with_the_plan_that_writes_its_first_token(harness: Harness):
    """Rows have 14 tokens at first: position 16 is the third to be computed after the prompt."""
    harness.submit(prompt_of(14), max_tokens=2 * PAGE)
    harness.run()
    computed = 0
    for plan in harness.plans:
        pages = sum(len(pages) for _, _, pages in plan.new_pages)
        computed += dict(plan.chunks).get(0, 1)
        assert pages == (computed - 1 == PAGE or computed - 1 == 2 * PAGE)
    harness.check_idle()


def test_long_prompts_go_in_chunks_beside_decoding_rows(harness: Harness):
    harness.submit(prompt_of(4, 1), max_tokens=30)
    harness.step()
    harness.submit(prompt_of(150, 2), max_tokens=2)
    harness.run()
    chunks = [count for plan in harness.plans for row, count in plan.chunks if row == 1]
    assert chunks == [32, 32, 32, 32, 22]
    assert all(sum(count for _, count in plan.chunks) + 1 <= 64 for plan in harness.plans)
    harness.check_idle()


def test_a_row_leaves_with_the_next_plan_that_computes_something(harness: Harness):
    short, long = harness.submit_together([prompt_of(5, 1), prompt_of(5, 2)], max_tokens=3)
    longer = harness.submit(prompt_of(5, 3), max_tokens=12)
    harness.run()
    leaves = [(plan.step, plan.leaves) for plan in harness.plans if plan.leaves]
    assert sorted(row for _, rows in leaves for row in rows) == [0, 1]  # the last row's leave goes with no plan
    assert len(longer.tokens) == 12
    assert short.is_released
    assert long.is_released
    harness.check_idle()


def test_nobody_s_match_is_evicted_for_another_who_joins_in_the_same_plan():
    harness = Harness(num_pages=8)
    cached, other = prompt_of(4 * PAGE, 1), prompt_of(3 * PAGE, 2)
    harness.submit(cached, max_tokens=1)
    harness.run()
    assert harness.ledger.groups["full"].num_cached == 4
    fresh, again = harness.submit_together([other, [*cached, 1]], max_tokens=1)
    harness.run()
    assert (again.num_cached, fresh.num_cached) == (4 * PAGE, 0)
    harness.check_idle()
    harness.close()


def test_nothing_is_admitted_while_told_so(harness: Harness):
    planner = harness.router.engine.planner
    planner.is_admitting = False
    client = harness.submit(prompt_of(5))
    assert harness.plans == []
    assert harness.router.requests[client.slot].status is RequestStatus.QUEUED
    planner.is_admitting = True
    harness.router.turn([])
    harness.run()
    harness.check_tokens(client)


def test_pages_of_an_aborted_row_stay_until_its_plans_have_ended(harness: Harness):
    client = harness.submit(prompt_of(20), max_tokens=50)
    harness.abort(client)
    assert harness.ledger.groups["full"].num_used > 0
    assert not client.is_released
    harness.step_all()
    harness.step_all()
    harness.run()
    harness.check_idle()


def test_a_victim_of_preemption_goes_on_where_it_was():
    harness = Harness(num_pages=12)
    clients = harness.submit_together([prompt_of(20, seed) for seed in (1, 2, 3)], max_tokens=100)
    harness.run()
    assert harness.router.statistics.num_preemptions > 0
    for client in clients:
        harness.check_tokens(client)
    rejoined = [join for plan in harness.plans for join in plan.joins if join.num_known > join.num_prompt]
    assert rejoined
    assert all(0 < join.num_cached < join.num_known for join in rejoined)
    harness.check_idle()
    harness.close()
