"""Whole requests over device and host: pages go out, come back, and every prefix read is the right one."""

import pytest

from serve.ipc.messages import Acquire, CancelJob, Claim, JobAnswer, LoadPages, Probe, Release, StorePages
from serve.multi_level_cache.page_state import DropReason
from serve.router.tier_statistics import Drop
from serve.types import FinishReason, JobResult, RequestStatus
from unit_tests.serve.router.router_fakes import PAGE, Client, prompt_of
from unit_tests.serve.router.tier_fakes import TierHarness


def with_host_pages(num_host: int = 6, **settings) -> TierHarness:
    """A host that has the first pages of `prompt_of(200)`, and a device that has nothing."""
    harness = TierHarness(**settings)
    harness.serve(prompt_of(200)[: num_host * PAGE], max_tokens=1)
    harness.evict_device()
    harness.job_log.clear()
    harness.sent_to_manager.clear()
    return harness


def until_loading(harness: TierHarness, phase: str = "copying", **sampling) -> Client:
    """A request whose pages are being acquired or copied."""
    client = harness.submit(prompt_of(200), **sampling)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    if phase == "copying":
        harness.deliver_to_manager()
        harness.deliver_to_router()
    assert harness.router.requests[client.slot].status is RequestStatus.LOADING
    load = harness.tiers.loader.get(harness.router.requests[client.slot])
    assert load.phase.value == phase
    return client


def tiers_of(client: Client) -> list[int]:
    """Cached pages by tier."""
    return [tokens // PAGE for tokens in client.outputs[0].cached_tokens]


# --- out and back ---


def test_full_prompt_pages_go_out_chunk_by_chunk():
    harness = TierHarness()
    harness.serve(prompt_of(100), max_tokens=4)
    stores = harness.jobs_of(StorePages)
    assert len(stores) == 3  # chunks of 32, 32, 32 and 4 tokens
    assert sum(len(store.pages) for store in stores) == 100 // PAGE
    assert harness.num_ready() == 100 // PAGE
    harness.check_idle()


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("groups", [("full",), ("full", "index")])
def test_a_prompt_that_left_the_device_comes_back_from_the_host(length: int, num_ranks: int, groups: tuple[str, ...]):
    harness = TierHarness(num_ranks=num_ranks, groups=groups)
    first = harness.serve(prompt_of(length), max_tokens=20)
    harness.evict_device()
    again = harness.serve(prompt_of(length), max_tokens=20)
    assert again.tokens == first.tokens
    assert tiers_of(again) == [0, (length - 1) // PAGE, 0]
    harness.check_idle()


def test_what_the_host_has_in_part_is_used_and_the_rest_computed():
    harness = with_host_pages(6)
    client = harness.serve(prompt_of(200))
    assert tiers_of(client) == [0, 6, 0]
    assert harness.num_ready() == 200 // PAGE
    harness.check_idle()


def test_device_and_host_are_used_together():
    harness = with_host_pages(6)
    harness.serve(prompt_of(200)[: 2 * PAGE], max_tokens=1)
    assert tiers_of(harness.serve(prompt_of(200))) == [2, 4, 0]
    harness.check_idle()


def test_a_hole_on_the_device_is_filled_from_the_host():
    harness = with_host_pages(6)
    harness.serve(prompt_of(200), max_tokens=1)
    index = harness.ledger.groups["full"].index
    names = harness.table.names(0)
    for number in (2, 3):
        harness.ledger.forget("full", index.page(names[number]))
    client = harness.serve(prompt_of(200))
    assert tiers_of(client) == [10, 2, 0]
    assert harness.jobs_of(LoadPages)[-1].pages
    harness.check_idle()


def test_device_hits_that_the_host_lacks_go_out_at_admission():
    harness = TierHarness()
    harness.serve(prompt_of(100))
    harness.manager.flush()
    assert harness.num_ready() == 0
    assert tiers_of(harness.serve(prompt_of(100))) == [6, 0, 0]
    assert harness.num_ready() == 6
    harness.check_idle()


def test_nothing_is_stored_twice():
    harness = TierHarness()
    harness.serve(prompt_of(100))
    harness.serve(prompt_of(100))
    harness.evict_device()
    harness.serve(prompt_of(100))
    assert sum(len(store.pages) for store in harness.jobs_of(StorePages)) == 6


def test_generated_pages_are_stored_only_when_told():
    for stores_output, expected in ((False, 2), (True, 6)):
        harness = TierHarness(stores_output=stores_output)
        client = harness.serve(prompt_of(40), max_tokens=60)
        assert harness.num_ready() == expected
        harness.evict_device()
        longer = client.prompt + client.tokens + prompt_of(5, 3)
        assert tiers_of(harness.serve(longer)) == [0, expected, 0]
        harness.check_idle()


def test_pages_beyond_a_stop_string_are_not_stored():
    harness = TierHarness(stores_output=True)
    client = harness.submit(prompt_of(40), max_tokens=100)
    while len(client.tokens) < 60:
        harness.deliver()
        harness.step_all()
    harness.finish(client, 10)
    harness.run()
    assert harness.num_ready() == 50 // PAGE
    harness.check_idle()


def test_other_requests_run_while_one_is_loading():
    harness = with_host_pages()
    loading = until_loading(harness)
    other = harness.submit(prompt_of(30, 5), max_tokens=10)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    for _ in range(20):
        harness.step_all()
    assert other.finishes == [FinishReason.LENGTH]
    assert not loading.outputs
    harness.run()
    harness.check_tokens(loading)
    assert tiers_of(loading) == [0, 6, 0]
    harness.check_idle()


def test_two_requests_share_one_load():
    harness = with_host_pages()
    clients = harness.submit_together([prompt_of(200)] * 2)
    harness.run()
    assert sum(len(load.pages) for load in harness.jobs_of(LoadPages)) == 6
    assert tiers_of(clients[0]) == [0, 6, 0]
    assert tiers_of(clients[1])[0] > 6  # and then what the first one computed
    for client in clients:
        harness.check_tokens(client)
    harness.check_idle()


def test_the_waiting_one_goes_on_when_the_load_that_it_waits_for_fails():
    harness = with_host_pages()
    clients = harness.submit_together([prompt_of(200)] * 2)
    for _ in range(2):
        harness.deliver_to_manager()
        harness.deliver_to_router()
    (load,) = harness.workers[0].jobs
    harness.answer(0, load, JobResult.FAILED)
    harness.run()
    for client in clients:
        harness.check_tokens(client)
    harness.check_idle()


def test_prompt_logprobs_skip_the_lookup_and_store():
    harness = with_host_pages()
    client = harness.serve(prompt_of(200), prompt_logprobs=0)
    assert tiers_of(client) == [0, 0, 0]
    assert not any(isinstance(message, Probe) for message in harness.sent_to_manager)
    assert harness.num_ready() == 12
    harness.check_idle()


# --- the decision ---


def test_a_load_that_would_take_longer_than_computing_is_not_begun():
    harness = with_host_pages()
    harness.router.engine.costs.observe_load(10_000_000, 1000.0, harness.clock.now)
    assert tiers_of(harness.serve(prompt_of(200))) == [0, 0, 0]
    assert not any(isinstance(message, Acquire) for message in harness.sent_to_manager)
    harness.check_idle()


def test_a_slow_measurement_fades_and_loading_is_tried_again():
    harness = with_host_pages()
    harness.router.engine.costs.observe_load(10_000_000, 1000.0, harness.clock.now)
    harness.clock.advance(1200)
    assert tiers_of(harness.serve(prompt_of(200))) == [0, 6, 0]


def test_loads_hold_no_more_than_their_share_of_the_pool():
    harness = TierHarness(num_pages=64, max_loading_fraction=0.125, num_slots=256)
    prompts = [prompt_of(100, seed) for seed in range(1, 5)]
    for prompt in prompts:
        harness.serve(prompt, max_tokens=1)
    harness.evict_device()
    clients = harness.submit_together(prompts, max_tokens=4)
    for _ in range(4):
        harness.deliver_to_manager()
        harness.deliver_to_router()
        assert harness.tiers.loader.num_held("full") <= 8
    assert harness.tiers.loader.num_held("full") == 6
    harness.run()
    for client in clients:
        harness.check_tokens(client)
        assert tiers_of(client) == [0, 6, 0]
    harness.check_idle()


def test_who_waits_for_the_load_path_recomputes_when_it_takes_too_long():
    harness = TierHarness(num_pages=64, max_loading_fraction=0.125, num_slots=256)
    prompts = [prompt_of(100, seed) for seed in range(1, 3)]
    for prompt in prompts:
        harness.serve(prompt, max_tokens=1)
    harness.evict_device()
    clients = harness.submit_together(prompts, max_tokens=4)
    for _ in range(3):
        harness.deliver_to_manager()
        harness.deliver_to_router()
    assert not harness.is_busy
    harness.clock.advance(harness.router.next_deadline() - harness.clock.now)
    harness.router.turn([])
    assert harness.is_busy  # the second one computes
    harness.run()
    assert tiers_of(clients[0]) == [0, 6, 0]
    assert tiers_of(clients[1]) == [0, 0, 0]
    harness.check_idle()


def test_a_prompt_larger_than_the_share_is_loaded_in_part():
    harness = with_host_pages(6, num_pages=32, max_loading_fraction=0.125)
    assert tiers_of(harness.serve(prompt_of(200))) == [0, 4, 0]
    harness.check_idle()


def test_a_busy_host_gives_a_shorter_prefix():
    """Pins stay below half of the arena, whatever the prompt."""
    harness = with_host_pages(6, num_slots=10)
    assert tiers_of(harness.serve(prompt_of(200))) == [0, 3, 0]
    harness.check_idle()


def test_what_is_missing_by_now_makes_the_prefix_shorter():
    harness = with_host_pages(6)
    client = harness.submit(prompt_of(200))
    harness.deliver_to_manager()
    names = harness.table.names(client.slot)
    node = harness.manager.host.directory.node(names[4])
    harness.manager.host.directory.drop(node.objects["full"], DropReason.EVICTED)
    harness.run()
    assert tiers_of(client) == [0, 4, 0]
    harness.check_tokens(client)
    harness.check_idle()


# --- ends ---


@pytest.mark.parametrize("phase", ["acquiring", "copying"])
@pytest.mark.parametrize("end", ["abort", "finish"])
def test_an_end_while_loading_gives_all_back_at_the_end_of_the_job(phase: str, end: str):
    harness = with_host_pages()
    client = until_loading(harness, phase)
    if end == "abort":
        harness.abort(client)
    else:
        harness.finish(client, 0)
    assert client.is_released
    if phase == "copying":
        assert harness.ledger.groups["full"].num_used == 6  # until the ranks have answered
        assert isinstance(harness.job_log[-1], CancelJob)
    else:
        assert harness.ledger.groups["full"].num_used == 0
        assert isinstance(harness.to_manager[-1], Release)
    harness.run()
    harness.check_idle()


def test_an_abort_once_loaded_leaves_the_pages_in_the_index():
    harness = with_host_pages(max_rows=1)
    blocker = harness.submit(prompt_of(10, 9), max_tokens=60)
    client = until_loading(harness)
    harness.deliver()
    assert not client.outputs
    harness.abort(client)
    assert client.is_released
    assert tiers_of(harness.serve(prompt_of(200))) == [6, 0, 0]
    harness.check_tokens(blocker)
    harness.check_idle()


def test_an_abort_while_stores_are_in_flight_frees_all_but_their_pages():
    harness = TierHarness()
    client = harness.submit(prompt_of(200))
    for _ in range(3):
        harness.step_all()
        harness.deliver_to_manager()
        harness.deliver_to_router()
    stored = sum(len(store.pages) for store in harness.jobs_of(StorePages))
    assert stored
    harness.abort(client)
    while harness.is_busy:
        harness.step_all()
    assert client.is_released
    assert harness.ledger.groups["full"].num_used == stored
    harness.run()
    harness.check_idle()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("result", [JobResult.FAILED, JobResult.DROPPED, JobResult.CANCELLED])
def test_a_load_that_fails_on_any_rank_is_recomputed(rank: int, result: JobResult):
    harness = with_host_pages(num_ranks=2)
    client = until_loading(harness)
    (load,) = harness.workers[rank].jobs
    harness.answer(rank, load, result)
    harness.run()
    harness.check_tokens(client)
    assert tiers_of(client) == [0, 0, 0]
    harness.check_idle()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("result", [JobResult.FAILED, JobResult.DROPPED, JobResult.CANCELLED])
def test_a_store_that_fails_on_any_rank_is_tried_again_at_the_end(rank: int, result: JobResult):
    harness = TierHarness(num_ranks=2)
    client = harness.submit(prompt_of(200))
    failed = False
    while not failed:
        harness.step_all()
        harness.deliver_to_manager()
        harness.deliver_to_router()
        for job in list(harness.workers[rank].jobs):
            harness.answer(rank, job, result)
            failed = True
    harness.run()
    harness.check_tokens(client)
    assert harness.num_ready() == 12
    harness.check_idle()


def test_late_replies_are_released():
    harness = with_host_pages()
    client = until_loading(harness, "acquiring")
    harness.clock.advance(10)
    harness.router.turn([])
    assert harness.router.statistics.tiers.loads.num_dropped[Drop.LATE] == 1
    harness.run()
    harness.check_tokens(client)
    assert tiers_of(client) == [0, 0, 0]
    harness.check_idle()


def test_late_claim_replies_are_released_and_tried_again_at_the_end():
    harness = TierHarness()
    client = harness.submit(prompt_of(100), max_tokens=30)
    harness.deliver()
    harness.step_all()
    harness.step_all()
    assert any(isinstance(message, Claim) for message in harness.to_manager)
    harness.clock.advance(1.5)
    harness.router.turn([])
    harness.run()
    harness.check_tokens(client)
    assert harness.num_ready() == 6
    harness.check_idle()


def test_a_load_far_slower_than_predicted_is_given_up():
    harness = with_host_pages()
    client = until_loading(harness)
    harness.clock.advance(harness.router.next_deadline() - harness.clock.now)
    harness.router.turn([])
    while harness.is_busy:
        harness.step_all()
    harness.check_tokens(client)  # although the job has not ended
    assert len(harness.tiers.jobs) >= 1
    harness.run()
    harness.check_idle()


def test_nothing_is_loaded_behind_a_load_that_is_stuck():
    harness = with_host_pages()
    until_loading(harness)
    harness.clock.advance(harness.router.next_deadline() - harness.clock.now)
    harness.router.turn([])
    while harness.is_busy:
        harness.step_all()
    answers = [message for message in harness.to_router if isinstance(message, JobAnswer)]
    harness.to_router.clear()
    harness.evict_device()
    num_loads = len(harness.jobs_of(LoadPages))
    client = harness.submit(prompt_of(200))
    harness.deliver_to_manager()
    harness.deliver_to_router()
    while harness.is_busy:
        harness.step_all()
    harness.check_tokens(client)
    assert len(harness.jobs_of(LoadPages)) == num_loads
    harness.to_router.extend(answers)
    harness.run()
    harness.evict_device()
    assert tiers_of(harness.serve(prompt_of(200)))[1] > 0
    harness.check_idle()


def test_without_overlap_no_plan_is_sent_while_a_job_runs():
    harness = TierHarness(cache_is_sync=True)
    client = harness.submit(prompt_of(100), max_tokens=10)
    for _ in range(300):
        num_jobs, num_plans = len(harness.tiers.jobs), len(harness.plans)
        harness.deliver_to_manager()
        harness.router.turn([])
        assert not num_jobs or len(harness.plans) == num_plans
        harness.deliver_to_router()
        harness.run_jobs()
        harness.step_all()
    harness.run()
    harness.check_tokens(client)
    assert harness.num_ready() == 6
    harness.evict_device()
    assert tiers_of(harness.serve(prompt_of(100))) == [0, 6, 0]
    harness.check_idle()


# --- flush ---


def test_no_page_of_before_a_flush_is_hit_after_it():
    harness = with_host_pages()
    harness.serve(prompt_of(100, 4))
    running = harness.submit(prompt_of(60, 5), max_tokens=30)
    for _ in range(6):
        harness.deliver()
        harness.step_all()
    loading = until_loading(harness)
    harness.router.flush(quiet_s=10.0)
    harness.manager.flush()
    harness.router.open_tiers()
    harness.run()
    for client in (running, loading):
        harness.check_tokens(client)
    assert tiers_of(loading) == [0, 0, 0]
    assert tiers_of(harness.serve(prompt_of(100, 4))) == [0, 0, 0]
    assert tiers_of(harness.serve(prompt_of(60, 5))) == [0, 0, 0]
    harness.check_idle()


def test_nothing_is_asked_while_a_flush_is_going_on_and_all_after_it():
    harness = with_host_pages()
    harness.router.flush(quiet_s=10.0)
    assert tiers_of(harness.serve(prompt_of(200))) == [0, 0, 0]
    assert not harness.sent_to_manager
    harness.clock.advance(10.0)
    harness.evict_device()
    assert tiers_of(harness.serve(prompt_of(200))) == [0, 6, 0]
