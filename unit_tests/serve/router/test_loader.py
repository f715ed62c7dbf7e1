"""Loads: acquired, copied, joined; and given up on every way without losing a page."""

import pytest

from serve.ipc.messages import Acquire, CancelJob, LoadPages, Release
from serve.router.load import LoadPhase
from serve.router.tier_statistics import Drop
from serve.types import JobResult, RequestStatus
from unit_tests.serve.router.router_fakes import PAGE, Client, prompt_of
from unit_tests.serve.router.tier_fakes import TierHarness

NUM_HOST = 6
PROMPT = prompt_of(200)


@pytest.fixture
def harness() -> TierHarness:
    """A host that has the prompt's first pages, and a device that has nothing."""
    made = TierHarness()
    made.serve(PROMPT[: NUM_HOST * PAGE], max_tokens=1)
    made.evict_device()
    made.job_log.clear()
    made.sent_to_manager.clear()
    return made


def looked_up(harness: TierHarness) -> Client:
    """A request whose pages are being acquired."""
    client = harness.submit(PROMPT)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    assert status_of(harness, client) is RequestStatus.LOADING
    return client


def copying(harness: TierHarness) -> Client:
    """A request whose pages are being copied."""
    client = looked_up(harness)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    return client


def status_of(harness: TierHarness, client: Client) -> RequestStatus:
    return harness.router.requests[client.slot].status


def drops(harness: TierHarness) -> dict[Drop, int]:
    found = harness.router.statistics.tiers.loads.num_dropped
    return {reason: count for reason, count in found.items() if count}


def test_pages_are_reserved_before_they_are_acquired_and_held_while_they_come(harness: TierHarness):
    client = looked_up(harness)
    loader = harness.tiers.loader
    load = loader.get(harness.router.requests[client.slot])
    assert load is not None
    assert (len(loader), load.phase) == (1, LoadPhase.ACQUIRING)
    assert loader.num_held("full") == NUM_HOST
    assert harness.ledger.groups["full"].num_used >= NUM_HOST
    assert len(loader.coming) == NUM_HOST
    assert loader.bytes_coming > 0
    (acquire,) = [message for message in harness.sent_to_manager if isinstance(message, Acquire)]
    assert [(pages.first, pages.count) for pages in acquire.ranges] == [(0, NUM_HOST)]
    harness.run()
    harness.check_tokens(client)
    assert client.outputs[0].cached_tokens == [0, NUM_HOST * PAGE, 0]
    assert len(loader) == 0
    harness.check_idle()


def test_nothing_computes_a_loading_request(harness: TierHarness):
    client = copying(harness)
    assert not any(join.slot == client.slot for plan in harness.plans[-2:] for join in plan.joins)
    (load,) = harness.jobs_of(LoadPages)
    assert len(load.pages) == NUM_HOST
    harness.run()
    harness.check_tokens(client)


@pytest.mark.parametrize("begin", [looked_up, copying])
def test_an_abort_gives_everything_back_but_not_before_the_ranks_have_answered(harness: TierHarness, begin):
    client = begin(harness)
    harness.abort(client)
    assert len(harness.tiers.loader) == 0
    if begin is copying:
        assert harness.jobs_of(CancelJob)
        assert harness.ledger.groups["full"].num_used == NUM_HOST
        assert harness.tiers.loader.num_held("full") == NUM_HOST
    harness.run()
    assert harness.tiers.loader.num_held("full") == 0
    harness.check_idle()


def test_a_copy_that_fails_is_recomputed(harness: TierHarness):
    client = copying(harness)
    (job,) = harness.jobs_of(LoadPages)
    harness.answer(0, job, JobResult.FAILED)
    harness.run()
    harness.check_tokens(client)
    assert harness.router.statistics.tiers.loads.num_ended[JobResult.FAILED] == 1
    harness.check_idle()


def test_a_manager_that_does_not_answer_costs_the_deadline_only(harness: TierHarness):
    client = looked_up(harness)
    harness.to_manager.clear()
    harness.clock.advance(10.0)
    harness.router.turn([])
    assert drops(harness)[Drop.LATE] == 1
    harness.settle()
    harness.run()
    harness.check_tokens(client)


def test_a_reply_that_nobody_waits_for_is_given_back(harness: TierHarness):
    client = looked_up(harness)
    harness.deliver_to_manager()
    harness.abort(client)
    harness.deliver_to_router()
    assert any(isinstance(message, Release) for message in harness.to_manager)
    harness.run()
    assert harness.leases() == []
    harness.check_idle()


def test_pages_that_went_between_lookup_and_acquire_shorten_the_prefix(harness: TierHarness):
    client = looked_up(harness)
    harness.manager.flush()
    harness.run()
    harness.check_tokens(client)
    assert client.num_cached == 0
    assert drops(harness)[Drop.MISSING] >= 1
    harness.check_idle()


def test_a_load_gives_way_and_its_request_waits_in_line_again(harness: TierHarness):
    client = copying(harness)
    assert harness.tiers.loader.give_way(behind=None)
    assert status_of(harness, client) is RequestStatus.PREEMPTED
    assert not harness.tiers.loader.give_way(behind=None)
    assert drops(harness)[Drop.PREEMPTED] == 1
    harness.run()
    harness.check_tokens(client)
    harness.check_idle()


def test_who_needs_a_page_that_is_coming_waits_for_it(harness: TierHarness):
    first = copying(harness)
    second = harness.submit(PROMPT)
    harness.run()
    for client in (first, second):
        harness.check_tokens(client)
    assert len(harness.jobs_of(LoadPages)) == 1
    assert second.outputs[0].cached_tokens[0] >= NUM_HOST * PAGE
    harness.check_idle()


def test_a_preempted_request_finds_what_the_device_gave_to_others_in_the_host():
    harness = TierHarness(num_pages=12, loads_always=True)
    clients = harness.submit_together([prompt_of(50, seed) for seed in range(3)], max_tokens=60)
    queue = harness.router.engine.queue
    while not (waiting := [request for request in queue if request.num_preemptions]):
        harness.deliver()
        harness.step_all()
    assert waiting[0].status is RequestStatus.LOOKING_UP
    num_loads = len(harness.jobs_of(LoadPages))
    harness.evict_device()
    harness.run()
    assert len(harness.jobs_of(LoadPages)) > num_loads
    for client in clients:
        harness.check_tokens(client)
    harness.check_idle()


def test_a_flush_of_one_root_ends_only_its_loads(harness: TierHarness):
    client = looked_up(harness)
    harness.router.flush(root=bytes(32))
    assert status_of(harness, client) is RequestStatus.LOADING
    harness.router.flush(root=harness.router.requests[client.slot].root)
    assert status_of(harness, client) is RequestStatus.QUEUED
    assert drops(harness) == {Drop.FLUSHED: 1}
    harness.run()
    harness.check_tokens(client)
    harness.check_idle()
