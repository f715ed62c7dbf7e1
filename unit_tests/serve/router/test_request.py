"""The table of transitions, and the one mutator that obeys it."""

import itertools

import numpy as np
import pytest

from serve.router.request import TRANSITIONS, IllegalTransitionError, Request, RequestKey
from serve.types import RequestStatus, SamplingParams
from unit_tests.serve.router.router_fakes import FakeClock


def make_request(order: int = 0, priority: int = 0, num_prompt: int = 10, slot: int = 0) -> Request:
    clock = FakeClock()
    return Request(
        key=RequestKey(slot, 1),
        server=0,
        request_id="r",
        priority=priority,
        order=order,
        arrival=clock.now,
        clock=clock,
        sampling=SamplingParams(max_tokens=10),
        num_prompt=num_prompt,
        limit=num_prompt + 10,
        tokens=np.zeros(100, np.uint32),
        root=b"",
        names=[],
    )


def test_every_status_is_in_the_table_and_only_released_is_final():
    assert set(TRANSITIONS) == set(RequestStatus)
    assert [status for status, to in TRANSITIONS.items() if not to] == [RequestStatus.RELEASED]


def test_an_end_is_reachable_from_every_living_status():
    for status, to in TRANSITIONS.items():
        if status not in (RequestStatus.DRAINING, RequestStatus.RELEASED):
            assert RequestStatus.DRAINING in to


@pytest.mark.parametrize(("start", "to"), list(itertools.product(RequestStatus, RequestStatus)))
def test_moves_outside_the_table_raise_and_change_nothing(start: RequestStatus, to: RequestStatus):
    request = make_request()
    request._status = start
    if to in TRANSITIONS[start]:
        request.advance(to)
        assert request.status is to
        return
    with pytest.raises(IllegalTransitionError):
        request.advance(to)
    assert request.status is start


def test_a_move_stamps_the_time():
    request = make_request()
    request.clock.advance(2.5)
    request.advance(RequestStatus.PREFILLING)
    assert request.entered == {RequestStatus.QUEUED: 100.0, RequestStatus.PREFILLING: 102.5}


def test_cached_tokens_are_those_of_the_first_admission():
    request = make_request()
    request.count_cached([32, 0, 0])
    request.count_cached([0, 64, 0])
    assert request.cached_tokens == [32, 0, 0]
