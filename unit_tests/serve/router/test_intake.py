"""Slots come back whatever happens to the HTTP process that filled them."""

from serve.ipc.messages import ServerDown, SubmitRequest
from unit_tests.serve.router.router_fakes import Harness, prompt_of


def forget(harness: Harness, client) -> None:
    del harness.clients[client.slot, client.generation]


def test_a_slot_that_was_filled_and_not_submitted_comes_back_with_its_servers_death():
    harness = Harness()
    lost, other = harness.fill(prompt_of(5), server=1), harness.fill(prompt_of(5), server=0)
    harness.router.turn([ServerDown(1)])
    assert harness.table.is_free(lost.slot)
    assert not harness.table.is_free(other.slot)


def test_a_submission_that_comes_after_its_servers_death_is_dropped():
    harness = Harness()
    lost = harness.fill(prompt_of(5), server=1)
    harness.router.turn([ServerDown(1), SubmitRequest(lost.slot, lost.generation, 1, "late")])
    assert not harness.router.requests
    assert harness.router.statistics.num_stale == 1
    forget(harness, lost)
    harness.check_idle()


def test_a_slot_whose_request_still_drains_is_released_once():
    harness = Harness()
    client = harness.submit(prompt_of(20), server=1, max_tokens=20)
    harness.step_all()
    harness.router.turn([ServerDown(1)])
    assert not harness.table.is_free(client.slot)
    harness.run()
    assert client.is_released
    forget(harness, client)
    harness.check_idle()
