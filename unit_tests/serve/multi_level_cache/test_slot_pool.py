"""Host slots: each in one place, and out of use while a job may still touch it."""

import pytest

from serve.multi_level_cache.page_state import IllegalMoveError
from serve.multi_level_cache.slot_pool import SlotPool


@pytest.fixture
def pool() -> SlotPool:
    pool = SlotPool(8)
    pool.grow(6)
    return pool


def counts(pool: SlotPool) -> tuple[int, int, int]:
    """Free, taken, blocked."""
    assert pool.check_integrity() == []
    return pool.num_free, pool.num_taken, pool.num_blocked


def test_slots_come_lowest_first_and_all_or_none(pool: SlotPool):
    assert pool.take(4) == (0, 1, 2, 3)
    assert pool.take(3) is None
    assert pool.take(2) == (4, 5)
    assert counts(pool) == (0, 6, 0)


def test_what_is_given_back_is_taken_together_again(pool: SlotPool):
    slots = pool.take(6)
    assert slots is not None
    pool.give_back((3, 1, 2))
    assert pool.take(3) == (1, 2, 3)
    with pytest.raises(IllegalMoveError, match="slot 7"):
        pool.give_back([7])


def test_the_pool_grows_and_never_shrinks(pool: SlotPool):
    pool.grow(8)
    assert pool.take(8) == tuple(range(8))
    for wrong in (7, 9):
        with pytest.raises(IllegalMoveError):
            pool.grow(wrong)


def test_a_blocked_slot_is_out_of_use_until_the_last_job_has_ended(pool: SlotPool):
    pool.block([0, 1], "a")
    pool.block([1], "b")
    assert counts(pool) == (4, 0, 2)
    assert pool.take(1) == (2,)
    pool.unblock("a")
    assert counts(pool) == (4, 1, 1)
    pool.unblock("b")
    pool.unblock("never")
    assert counts(pool) == (5, 1, 0)


def test_a_block_on_a_taken_slot_counts_from_when_it_is_given_back(pool: SlotPool):
    slots = pool.take(2)
    assert slots is not None
    pool.block(slots[:1], "job")
    assert counts(pool) == (4, 2, 0)
    pool.give_back(slots)
    assert counts(pool) == (5, 0, 1)
    pool.unblock("job")
    assert counts(pool) == (6, 0, 0)


def test_a_block_on_a_slot_without_memory_counts_once_it_has_some(pool: SlotPool):
    pool.block([6], "job")
    assert counts(pool) == (6, 0, 0)
    pool.grow(8)
    assert counts(pool) == (7, 0, 1)
