"""Rows."""

import pytest

from serve.router.batch import Batch, RowPhase
from unit_tests.serve.router.test_request import make_request


def test_the_lowest_free_row_is_given_and_its_leave_is_told_once():
    batch = Batch(3)
    first, second = make_request(0), make_request(1)
    assert (batch.join(first), batch.join(second)) == (0, 1)
    batch.remove(first)
    assert first.row is None
    assert batch.join(make_request(2)) == 0
    assert batch.take_leaves() == [0]
    assert batch.take_leaves() == []
    assert batch.num_free_rows == 1


def test_a_snapshot_stays_what_it_was():
    batch = Batch(2)
    request = make_request()
    batch.join(request)
    before = batch.snapshot()
    assert batch.snapshot() is before
    batch.remove(request)
    assert before == (request, None)
    assert batch.snapshot() == (None, None)


def test_a_row_is_in_one_phase():
    batch = Batch(2)
    request = make_request()
    batch.join(request)
    for phase in (RowPhase.DECODING, RowPhase.NEEDY, RowPhase.DECODING):
        batch.move(request, phase)
        assert [p for p in RowPhase if batch.phases[p]] == [phase]
    batch.remove(request)
    batch.remove(request)
    assert not any(batch.phases.values())
    with pytest.raises(LookupError):
        batch.request(0)


def test_running_requests_are_listed_oldest_first():
    batch = Batch(3)
    young, old = make_request(5), make_request(1)
    batch.join(young)
    batch.join(old)
    assert batch.running() == [old, young]
