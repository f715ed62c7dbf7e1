"""Slots of one HTTP process, over a table that says which are free."""

from dataclasses import dataclass, field

from serve.httpserver.slot_pool import SlotPool


@dataclass
class FakeTable:
    """Generations, and the slots that are in use."""

    busy: set[int] = field(default_factory=set)
    generations: dict[int, int] = field(default_factory=dict)

    def is_free(self, slot: int) -> bool:
        return slot not in self.busy

    def generation(self, slot: int) -> int:
        return self.generations.get(slot, 1)


def test_only_owned_slots_are_given_all_or_none():
    pool = SlotPool(FakeTable(), range(4, 7))
    assert pool.num_owned == 3
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert sorted(pool.take(3) or []) == [4, 5, 6]
    assert pool.take(1) is None


def test_a_new_process_finds_free_slots_from_the_table():
    assert SlotPool(FakeTable(busy={0, 2}), range(4)).take(2) == [1, 3]


def test_a_slot_that_was_never_submitted_comes_back_once():
    pool = SlotPool(FakeTable(), range(1))
    assert pool.take(1) == [0]
    pool.put_back(0)
    pool.put_back(0)
    assert pool.num_free == 1


def test_a_submitted_slot_is_free_only_when_released_under_its_generation():
    table = FakeTable()
    pool = SlotPool(table, range(1))
    assert pool.take(1) == [0]
    table.busy, table.generations = {0}, {0: 7}
    pool.let_go(0)
    pool.released([(0, 7)])  # the table says otherwise
    assert pool.num_free == 0
    table.busy = set()
    pool.released([(0, 6), (5, 7)])  # an older one, and another process's
    assert pool.num_free == 0
    pool.released([(0, 7), (0, 7)])
    assert pool.num_free == 1


def test_a_release_that_got_lost_is_found_when_slots_run_out():
    table = FakeTable()
    pool = SlotPool(table, range(1))
    assert pool.take(1) == [0]
    pool.let_go(0)
    assert pool.num_free == 0
    assert pool.take(1) == [0]
