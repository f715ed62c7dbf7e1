"""The cache manager dies between any two messages, mailboxes fill, pools are tiny: requests never notice."""

import pytest

from serve.ipc.messages import Begin, LeaseLost, StorePages
from serve.router.tier_statistics import Drop
from serve.types import JobResult, RequestStatus
from unit_tests.serve.router.router_fakes import PAGE, prompt_of
from unit_tests.serve.router.test_tiers import tiers_of, until_loading, with_host_pages
from unit_tests.serve.router.tier_fakes import TierHarness


def run_with_a_manager_that_reads(harness: TierHarness, num_messages: int, loses_mail: bool) -> None:
    """It dies when it has read so many messages; a new one comes a few steps later."""
    for _ in range(400):
        while harness.to_manager and harness.manager is not None and num_messages:
            harness.manager.handle(harness.to_manager.popleft())
            num_messages -= 1
        if not num_messages and harness.manager is not None:
            harness.kill_manager()
            if loses_mail:
                harness.to_manager.clear()
        harness.run_jobs()
        harness.deliver_to_router()
        harness.step_all()
        if not harness.router.requests:
            break
        if not harness.is_busy:
            harness.clock.advance(0.05)
            harness.router.turn([])
    harness.settle()


@pytest.mark.parametrize("num_messages", range(14))
@pytest.mark.parametrize("loses_mail", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_manager_dies_between_any_two_messages(num_messages: int, loses_mail: bool, num_ranks: int):
    harness = with_host_pages(6, num_ranks=num_ranks)
    clients = harness.submit_together([prompt_of(200), prompt_of(90, 3), prompt_of(200)[: 7 * PAGE]], max_tokens=12)
    run_with_a_manager_that_reads(harness, num_messages, loses_mail)
    for client in clients:
        harness.check_tokens(client)
    harness.serve(prompt_of(200))
    harness.check_idle()


def test_a_lost_lease_ends_the_load_and_its_pages_are_not_published():
    harness = with_host_pages()
    client = until_loading(harness)
    (job,) = harness.workers[0].jobs
    harness.router.turn([LeaseLost(job.job)])
    assert harness.router.requests[client.slot].status is not RequestStatus.LOADING
    harness.run()
    harness.check_tokens(client)
    assert tiers_of(client) == [0, 0, 0]
    assert harness.router.statistics.tiers.loads.num_dropped[Drop.LOST] == 1
    harness.check_idle()


def test_a_mailbox_that_fills_between_claim_and_begin_stores_nothing():
    harness = TierHarness()
    client = harness.submit(prompt_of(60), max_tokens=3)
    harness.deliver()
    harness.step_all()
    harness.deliver_to_manager()
    harness.is_mailbox_full = True
    while harness.is_busy:
        harness.deliver_to_router()
        harness.step_all()
    assert not harness.jobs_of(StorePages)
    harness.settle()
    harness.check_tokens(client)
    harness.check_idle()


def test_a_page_that_goes_between_claim_and_reply_is_not_stored_and_the_others_are():
    harness = TierHarness()
    client = harness.submit(prompt_of(100), max_tokens=40)
    harness.deliver()
    harness.step_all()
    harness.step_all()
    harness.deliver_to_manager()
    names = harness.router.requests[client.slot].names
    harness.ledger.forget("full", harness.ledger.groups["full"].index.page(names[1]))
    harness.run()
    assert harness.num_ready() == 100 // PAGE - 1
    assert harness.router.statistics.tiers.stores.num_dropped[Drop.EVICTED] == 1
    harness.check_tokens(client)
    harness.check_idle()


def test_a_claim_at_the_end_names_only_what_the_device_has():
    """A page that neither device nor host has any more must not come back in every reply."""
    harness = TierHarness()
    client = harness.submit(prompt_of(100), max_tokens=40)
    while not client.tokens:
        harness.deliver()
        harness.step_all()
    harness.deliver()
    names = harness.router.requests[client.slot].names
    harness.manager.flush()
    harness.router.requests[client.slot].stored["full"] = 0b11
    for number in (1, 3):
        harness.ledger.forget("full", harness.ledger.groups["full"].index.page(names[number]))
    harness.run()
    assert harness.num_ready() == 4
    harness.check_tokens(client)
    harness.check_idle()


def test_a_failed_row_takes_its_stores_back():
    harness = TierHarness()
    client = harness.submit(prompt_of(200))
    while not harness.workers[0].jobs:
        harness.step_all()
        harness.deliver_to_manager()
        harness.deliver_to_router()
    harness.router._living.fail(harness.router.requests[client.slot], "not finite")
    harness.run()
    assert harness.router.statistics.tiers.stores.num_ended[JobResult.CANCELLED]
    assert harness.num_ready() == 0
    harness.check_idle()


def test_stores_hold_no_more_than_a_share_of_the_pool_and_the_rest_follows():
    harness = TierHarness(num_pages=40)
    client = harness.submit(prompt_of(400), max_tokens=4)
    while not client.is_released:
        harness.deliver_to_manager()
        harness.deliver_to_router()
        assert harness.tiers.jobs.num_pages <= 10
        harness.step_all()
    while harness.tiers.jobs.num_pages:
        harness.run_jobs()
        for _ in range(3):
            harness.deliver_to_router()
            harness.deliver_to_manager()
        assert harness.tiers.jobs.num_pages <= 10
    assert harness.num_ready() == 25
    harness.check_idle()


def test_what_was_put_off_and_evicted_meanwhile_is_counted():
    harness = TierHarness(num_pages=40)
    client = harness.submit(prompt_of(400), max_tokens=4)
    while not client.is_released:
        harness.deliver_to_manager()
        harness.deliver_to_router()
        harness.step_all()
    harness.evict_device()
    harness.run()
    assert harness.num_ready() == 10
    assert harness.router.statistics.tiers.stores.num_dropped[Drop.EVICTED] == 15
    harness.check_idle()


@pytest.mark.parametrize("num_pages", [6, 8, 12])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_tiny_pools_never_come_to_a_halt(num_pages: int, fraction: float):
    harness = TierHarness(num_pages=num_pages, max_loading_fraction=fraction, num_slots=128)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((40, 60, 80, 30, 75))]
    for _ in range(3):
        clients = harness.submit_together(prompts, max_tokens=12)
        harness.run()
        for client in clients:
            harness.check_tokens(client)
        harness.evict_device()
    assert harness.router.statistics.tiers.loads.num_ended[JobResult.DONE]
    harness.check_idle()


def test_rows_that_run_take_pages_from_loads():
    harness = TierHarness(num_pages=7, max_loading_fraction=1.0, num_slots=128)
    harness.serve(prompt_of(90), max_tokens=1)
    harness.evict_device()
    running = harness.submit(prompt_of(10, 7), max_tokens=150)
    harness.deliver()
    harness.router.engine.admission.estimate.fraction = 0.05
    harness.router.engine.planner._pages.growth.end(harness.router.requests[running.slot])
    loading = harness.submit(prompt_of(90), max_tokens=2)
    for _ in range(2):
        harness.deliver_to_manager()
        harness.deliver_to_router()
    assert harness.router.requests[loading.slot].status is RequestStatus.LOADING
    for _ in range(80):
        harness.step_all()
    assert harness.router.requests[loading.slot].status is RequestStatus.PREEMPTED
    harness.run()
    harness.check_tokens(running)
    harness.check_tokens(loading)
    harness.check_idle()


def test_an_answer_may_overtake_everything():
    """A rank may be done before the manager has read Begin."""
    harness = TierHarness()
    client = harness.submit(prompt_of(60), max_tokens=3)
    harness.deliver()
    harness.step_all()
    harness.deliver_to_manager()
    harness.deliver_to_router()
    begins = [message for message in harness.to_manager if isinstance(message, Begin)]
    for begin in begins:
        harness.to_manager.remove(begin)
    harness.run_jobs()
    harness.to_manager.extend(begins)
    harness.run()
    harness.check_tokens(client)
    assert harness.num_ready() == 3
    harness.check_idle()
