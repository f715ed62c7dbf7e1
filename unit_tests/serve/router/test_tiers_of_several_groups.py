"""States of several groups out to the host and the disk, and back: all that a boundary needs, or nothing of it."""

import pytest

from serve.ipc.messages import Begin, LoadPages, Message, Release, StorePages
from serve.multi_level_cache.page_state import DropReason, PageKey
from serve.router.tier_statistics import Drop
from serve.types import JobResult
from unit_tests.serve.multi_level_cache.fake_tier import FakeTier
from unit_tests.serve.router.router_fakes import PAGE, prompt_of
from unit_tests.serve.router.test_several_groups import HYBRIDS, STATEFUL
from unit_tests.serve.router.test_tiers import tiers_of
from unit_tests.serve.router.tier_fakes import TierHarness

ALL = ("full", "window", "state")


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prompt_that_left_the_device_comes_back_from_the_host(groups: tuple[str, ...], length: int, num_ranks: int):
    harness = TierHarness(num_ranks=num_ranks, groups=groups, num_slots=128)
    first = harness.serve(prompt_of(length), max_tokens=40)
    harness.evict_device()
    again = harness.serve(prompt_of(length), max_tokens=40)
    assert again.tokens == first.tokens
    assert tiers_of(again) == [0, (length - 1) // PAGE, 0]
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
def test_what_left_the_host_too_comes_back_from_disk(groups: tuple[str, ...]):
    harness = TierHarness(groups=groups, num_slots=128, tier=lambda arena: FakeTier(), loads_always=True)
    harness.serve(prompt_of(100), max_tokens=5)
    harness.evict_device()
    harness.evict_host()
    assert harness.num_ready() == 0
    assert tiers_of(harness.serve(prompt_of(100), max_tokens=30)) == [0, 0, 6]
    harness.evict_device()
    assert tiers_of(harness.serve(prompt_of(100), max_tokens=30)) == [0, 6, 0]
    harness.check_idle()


@pytest.mark.parametrize("lost", ALL)
def test_a_boundary_without_the_object_of_one_group_is_not_loaded(lost: str):
    harness = TierHarness(groups=ALL, num_slots=128)
    client = harness.serve(prompt_of(100), max_tokens=1)
    harness.evict_device()
    name = harness.table.names(client.slot)[5]
    directory = harness.manager.host.directory
    directory.drop(directory.find(PageKey(name, lost)), DropReason.EVICTED)
    assert tiers_of(harness.serve(prompt_of(100), max_tokens=30)) == [0, 0, 0]
    harness.evict_device()
    assert tiers_of(harness.serve(prompt_of(100), max_tokens=30)) == [0, 6, 0]  # what was lost was stored again
    harness.check_idle()


@pytest.mark.parametrize("lost", ["window", "state"])
def test_only_what_the_device_lacks_is_loaded(lost: str):
    harness = TierHarness(groups=ALL, num_slots=128)
    harness.serve(prompt_of(100), max_tokens=1)
    harness.ledger.groups[lost].flush()
    harness.ledger.index_version += 1
    client = harness.serve(prompt_of(100), max_tokens=30)
    assert {job.group for job in harness.jobs_of(LoadPages)} == {lost}
    assert tiers_of(client) == [0, 6, 0]  # alone the device would have had nothing to go on from
    harness.check_idle()


def test_an_older_state_on_the_device_counts_as_far_as_it_goes():
    harness = TierHarness(groups=("full", "state"), num_slots=128, checkpoint_interval=2 * PAGE)
    harness.serve(prompt_of(100), max_tokens=1)
    index = harness.ledger.groups["state"].index
    names = harness.table.names(0)
    for place in (3, 5):
        harness.ledger.forget("state", index.page(names[place]))
    assert tiers_of(harness.serve(prompt_of(100), max_tokens=5)) == [2, 4, 0]
    harness.check_idle()


@pytest.mark.parametrize("failing", ALL)
@pytest.mark.parametrize("result", [JobResult.FAILED, JobResult.CANCELLED])
def test_a_load_that_fails_in_one_group_publishes_nothing_in_any(failing: str, result: JobResult):
    harness = TierHarness(groups=ALL, num_slots=128)
    harness.serve(prompt_of(100), max_tokens=1)
    harness.evict_device()
    client = harness.submit(prompt_of(100), max_tokens=30)
    for _ in range(2):
        harness.deliver_to_manager()
        harness.deliver_to_router()
    (worker,) = harness.workers
    assert sorted(job.group for job in worker.jobs) == sorted(ALL)
    for job in list(worker.jobs):
        harness.answer(0, job, result if job.group == failing else JobResult.DONE)
    harness.deliver_to_router()
    names = harness.table.names(client.slot)[4:]  # its first chunks are being computed by now
    assert all(name not in group.index for group in harness.ledger.groups.values() for name in names)
    harness.run()
    harness.check_tokens(client)
    assert tiers_of(client) == [0, 0, 0]
    harness.check_idle()


@pytest.mark.parametrize("num_told", [0, 1, 2])
def test_a_load_whose_manager_can_be_told_of_some_groups_only_is_given_back(
    num_told: int, monkeypatch: pytest.MonkeyPatch
):
    harness = TierHarness(groups=ALL, num_slots=128)
    harness.serve(prompt_of(100), max_tokens=1)
    harness.evict_device()
    client = harness.submit(prompt_of(100), max_tokens=30)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    harness.deliver_to_manager()
    told, loads = [], harness.router.statistics.tiers.loads
    before = loads.num_started

    def tell(message: Message) -> bool:
        told.append(message)
        return not isinstance(message, Begin) or sum(isinstance(each, Begin) for each in told) <= num_told

    with monkeypatch.context() as patch:
        send = harness.cache.tell
        patch.setattr(harness.cache, "tell", lambda message: tell(message) and send(message))
        harness.deliver_to_router()
    assert loads.num_started == before + num_told
    assert loads.num_dropped[Drop.AWAY] == 1
    assert sum(isinstance(message, Release) for message in told) == len(ALL) - num_told
    harness.run()
    harness.check_tokens(client)
    assert loads.num_started == sum(loads.num_ended.values())
    assert harness.leases() == []
    harness.check_idle()


@pytest.mark.parametrize("groups", STATEFUL)
def test_a_state_is_stored_once_the_plan_that_made_it_has_run(groups: tuple[str, ...]):
    harness = TierHarness(groups=groups, num_slots=128)
    harness.serve(prompt_of(100), max_tokens=1)
    made = next(plan.step for plan in harness.plans if plan.snapshots)
    stores = [job for job in harness.jobs_of(StorePages) if job.group == "state"]
    assert [len(job.pages) for job in stores] == [1]
    assert stores[0].after_step >= made
    assert len(stores[0].slots) == 3
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("stores_output", [False, True])
def test_the_state_of_an_answers_end_is_stored_with_the_answer_only(groups: tuple[str, ...], stores_output: bool):
    harness = TierHarness(groups=groups, num_slots=256, stores_output=stores_output)
    turn = harness.serve(prompt_of(45), max_tokens=50)
    harness.evict_device()
    longer = turn.prompt + turn.tokens + prompt_of(9, 2)
    assert tiers_of(harness.serve(longer, max_tokens=5)) == [0, 5 if stores_output else 2, 0]
    harness.check_idle()


def test_loads_of_windows_and_states_are_cut_to_boundaries_that_are_legal():
    harness = TierHarness(
        groups=("full", "state"), num_slots=128, num_pages=32, max_loading_fraction=0.125, checkpoint_interval=2 * PAGE
    )
    harness.serve(prompt_of(120), max_tokens=1)  # states at 32, 64, 96 and 112 tokens
    harness.evict_device()
    assert tiers_of(harness.serve(prompt_of(120), max_tokens=5)) == [0, 4, 0]
    harness.check_idle()


def test_a_full_host_evicts_all_objects_of_a_page_together():
    harness = TierHarness(groups=("full", "state"), num_slots=20)
    for seed in range(4):
        harness.serve(prompt_of(60, seed), max_tokens=1)
        for node in harness.manager.host.directory.nodes():
            assert len({page.key.name for page in node.objects.values()}) == 1
    nodes = list(harness.manager.host.directory.nodes())
    assert any(set(node.objects) == {"full", "state"} for node in nodes)
    assert harness.manager.check_integrity() == []
    harness.evict_device()
    harness.serve(prompt_of(60, 3), max_tokens=5)
    harness.check_idle()


def test_states_without_bytes_come_back_without_a_job():
    harness = TierHarness(groups=("full", "rest"), num_slots=128)
    harness.serve(prompt_of(100), max_tokens=1)
    harness.ledger.groups["rest"].flush()
    harness.ledger.index_version += 1
    assert tiers_of(harness.serve(prompt_of(100), max_tokens=5)) == [0, 6, 0]
    assert harness.jobs_of(LoadPages) == []
    assert {job.group for job in harness.jobs_of(StorePages)} == {"full"}
    harness.check_idle()
