"""Stores: what is claimed and when, and what becomes of pages that cannot go out."""

from serve.ipc.messages import Claim, Release, StorePages
from serve.router import write_back
from serve.router.tier_statistics import Drop
from serve.types import JobResult
from unit_tests.serve.router.router_fakes import PAGE, Client, prompt_of
from unit_tests.serve.router.tier_fakes import TierHarness


def claims(harness: TierHarness) -> list[Claim]:
    return [message for message in harness.sent_to_manager if isinstance(message, Claim)]


def num_claimed(harness: TierHarness) -> int:
    return sum(pages.count for claim in claims(harness) for pages in claim.ranges)


def drops(harness: TierHarness) -> dict[Drop, int]:
    found = harness.router.statistics.tiers.stores.num_dropped
    return {reason: count for reason, count in found.items() if count}


def look_up(harness: TierHarness, length: int, **sampling: object) -> Client:
    client = harness.submit(prompt_of(length), **sampling)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    return client


def compute_only(harness: TierHarness, length: int, **sampling: object) -> None:
    """A request to its end, while nothing but its lookup reaches the manager."""
    look_up(harness, length, **sampling)
    for _ in range(200):
        if not harness.is_busy:
            return
        harness.step_all()


def test_only_full_prompt_pages_are_claimed_and_each_once():
    harness = TierHarness()
    harness.serve(prompt_of(3 * PAGE + 5), max_tokens=2 * PAGE)
    assert num_claimed(harness) == 3
    assert {claim.num_prompt for claim in claims(harness)} == {3 * PAGE + 5}
    assert drops(harness) == {}
    harness.check_idle()


def test_nothing_is_claimed_before_the_plan_that_computes_it_has_ended():
    harness = TierHarness()
    look_up(harness, 2 * PAGE)
    assert claims(harness) == []
    harness.step_all()
    assert num_claimed(harness) == 2
    harness.run()
    harness.check_idle()


def test_a_claim_holds_no_page():
    harness = TierHarness()
    compute_only(harness, 4 * PAGE, max_tokens=1)
    assert claims(harness)
    assert harness.ledger.groups["full"].num_used == 0
    harness.run()
    assert harness.num_ready() == 4
    harness.check_idle()


def test_a_page_that_left_the_device_before_its_slot_came_is_dropped():
    harness = TierHarness()
    compute_only(harness, 4 * PAGE, max_tokens=1)
    harness.evict_device()
    harness.run()
    assert harness.jobs_of(StorePages) == []
    assert harness.num_ready() == 0
    assert drops(harness).get(Drop.EVICTED, 0) >= 4
    assert any(isinstance(message, Release) for message in harness.sent_to_manager)
    harness.check_idle()


def test_a_store_waits_for_the_plans_that_have_been_sent():
    harness = TierHarness()
    harness.serve(prompt_of(2 * PAGE), max_tokens=20)
    (store,) = harness.jobs_of(StorePages)
    steps = [plan.step for plan in harness.plans]
    assert store.after_step in steps


def test_no_more_than_a_share_of_the_pool_is_on_its_way():
    harness = TierHarness(num_pages=32)
    limit = int(32 * write_back.MAX_SHARE)
    compute_only(harness, 20 * PAGE, max_tokens=1)
    assert num_claimed(harness) == limit
    harness.run()
    assert harness.num_ready() == 20  # what was put off followed
    harness.check_idle()


def test_a_full_mailbox_costs_the_store_and_the_pages_stay_candidates():
    harness = TierHarness()
    harness.is_mailbox_full = True
    harness.serve(prompt_of(3 * PAGE))
    assert drops(harness)[Drop.AWAY] >= 3
    harness.is_mailbox_full = False
    harness.serve(prompt_of(3 * PAGE))
    assert harness.num_ready() == 3
    harness.check_idle()


def test_a_late_reply_is_none_and_its_slots_go_back():
    harness = TierHarness()
    compute_only(harness, 2 * PAGE, max_tokens=1)
    harness.deliver_to_manager()
    harness.clock.advance(2.0)
    harness.router.turn([])
    assert len(harness.tiers.write_back) == 0
    assert drops(harness)[Drop.LATE] == 2
    harness.run()
    assert harness.jobs_of(StorePages) == []
    harness.check_idle()


def test_a_store_that_fails_on_a_rank_is_tried_again_at_the_next_hit():
    harness = TierHarness(num_ranks=2)
    compute_only(harness, 2 * PAGE, max_tokens=1)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    (job,) = harness.jobs_of(StorePages)
    harness.answer(0, job, JobResult.FAILED)
    harness.answer(1, job)
    harness.run()
    assert harness.router.statistics.tiers.stores.num_ended[JobResult.FAILED] == 1
    harness.serve(prompt_of(2 * PAGE))
    assert harness.num_ready() == 2
    harness.check_idle()


def test_a_manager_that_dies_takes_its_claims_along():
    harness = TierHarness()
    compute_only(harness, 3 * PAGE, max_tokens=1)
    assert len(harness.tiers.write_back) > 0
    harness.kill_manager()
    harness.run()
    assert len(harness.tiers.write_back) == 0
    assert drops(harness)[Drop.LOST] >= 3
    harness.restart_manager()
    harness.serve(prompt_of(3 * PAGE))
    assert harness.num_ready() == 3
    harness.check_idle()
