"""An end at any status gives everything back."""

from collections.abc import Callable

import pytest

from serve.types import FinishReason, RequestStatus
from unit_tests.serve.router.router_fakes import Client, Harness, prompt_of


def queued() -> tuple[Harness, Client]:
    harness = Harness(max_rows=1)
    harness.submit(prompt_of(10, 1), max_tokens=30)
    return harness, harness.submit(prompt_of(10, 2))


def looking_up() -> tuple[Harness, Client]:
    harness = Harness().with_cache()
    return harness, harness.submit(prompt_of(40))


def held() -> tuple[Harness, Client]:
    harness = Harness()
    return harness, harness.submit_together([prompt_of(200)] * 2)[1]


def prefilling() -> tuple[Harness, Client]:
    harness = Harness()
    client = harness.submit(prompt_of(200))
    harness.step_all()
    return harness, client


def decoding() -> tuple[Harness, Client]:
    harness = Harness()
    client = harness.submit(prompt_of(20), max_tokens=50)
    for _ in range(10):
        harness.step_all()
    return harness, client


def preempted() -> tuple[Harness, Client]:
    """Preempted a moment ago: plans that compute it are in flight."""
    harness = Harness(num_pages=12)
    clients = harness.submit_together([prompt_of(20, seed) for seed in range(3)], max_tokens=100)
    while True:
        for client in clients:
            request = harness.router.requests.get(client.slot)
            if request is not None and request.status is RequestStatus.PREEMPTED:
                return harness, client
        harness.step_all()


def preempted_and_queued() -> tuple[Harness, Client]:
    harness, client = preempted()
    request = harness.router.requests[client.slot]
    while request not in list(harness.router.engine.queue):
        harness.step_all()
    return harness, client


STATES = [queued, looking_up, held, prefilling, decoding, preempted, preempted_and_queued]


@pytest.mark.parametrize("reach", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("times", [1, 2])
def test_an_abort_frees_everything(reach: Callable[[], tuple[Harness, Client]], times: int):
    harness, client = reach()
    for _ in range(times):
        harness.abort(client)
    assert client.finishes == [FinishReason.ABORT]
    harness.check()
    harness.run()
    harness.check_idle()


@pytest.mark.parametrize("reach", STATES, ids=lambda state: state.__name__)
def test_a_stop_string_frees_everything(reach: Callable[[], tuple[Harness, Client]]):
    harness, client = reach()
    harness.finish(client, len(client.tokens) // 2)
    assert client.finishes == [FinishReason.STOP]
    harness.run()
    harness.check_idle()


@pytest.mark.parametrize("reach", STATES, ids=lambda state: state.__name__)
def test_a_deadline_frees_everything(reach: Callable[[], tuple[Harness, Client]]):
    harness, client = reach()
    harness.clock.advance(harness.settings.step_timeout_s - 1.0)
    harness.router.intake.deadlines.clear()
    harness.router.intake.deadlines.append((harness.clock.now, harness.router.requests[client.slot].key))
    harness.router.turn([])
    assert client.last.error_code == 504
    harness.run()
    harness.check_idle()


@pytest.mark.parametrize("reach", STATES, ids=lambda state: state.__name__)
def test_an_end_of_all_frees_everything(reach: Callable[[], tuple[Harness, Client]]):
    harness, _ = reach()
    harness.router.abort_all()
    harness.router.turn([])
    harness.run()
    harness.check_idle()


def test_a_message_of_another_generation_touches_nobody():
    harness, client = decoding()
    client.generation += 1
    harness.abort(client)
    harness.finish(client, 1)
    client.generation -= 1
    harness.run()
    harness.check_tokens(client)


def test_an_abort_while_draining_is_no_second_end():
    harness, client = decoding()
    harness.finish(client, 3)
    assert not client.is_released
    harness.abort(client)
    harness.finish(client, 2)
    harness.run()
    assert client.finishes == [FinishReason.STOP]
    harness.check_idle()


def test_a_page_comes_back_only_when_the_plans_that_use_it_have_ended():
    harness, client = decoding()
    harness.abort(client)
    assert harness.ledger.groups["full"].num_used > 0
    harness.step_all()
    assert not client.is_released
    harness.step_all()
    assert client.is_released
    assert harness.ledger.groups["full"].num_used == 0
