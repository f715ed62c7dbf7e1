"""Names come from the table only while the request is surely in its slot."""

from dataclasses import replace

from serve.ipc.messages import PageRange
from serve.multi_level_cache.request_names import TableNames, as_ranges, wanted_objects
from unit_tests.serve.multi_level_cache.builders import request

PROMPT = replace(request(0, "a", "b", "c"), num_prompt=200)


class Table:
    """One slot; `changes` happens while the names are read."""

    def __init__(self) -> None:
        self.current, self.released, self.changes = 5, 4, lambda: None

    def generation(self, slot: int) -> int:
        return self.current

    def is_free(self, slot: int) -> bool:
        return self.current == self.released

    def root(self, slot: int) -> bytes:
        return PROMPT.root

    def names(self, slot: int) -> list[bytes]:
        self.changes()
        return PROMPT.names

    def num_prompt(self, slot: int) -> int:
        return PROMPT.num_prompt


def test_names_of_a_living_request_are_read():
    assert TableNames(Table(), 1).read(0, 5) == PROMPT


def test_another_generation_or_slot_has_no_names():
    assert TableNames(Table(), 1).read(0, 4) is None
    assert TableNames(Table(), 1).read(1, 5) is None
    assert TableNames(Table(), 1).read(-1, 5) is None


def test_names_read_while_the_slot_was_released_are_not_trusted():
    table = Table()

    def release() -> None:
        table.released = 5

    table.changes = release
    assert TableNames(table, 1).read(0, 5) is None


def test_ranges_come_back_as_they_were():
    ranges = [PageRange("full", 0, 3), PageRange("state", 1, 2)]
    wanted = wanted_objects(PROMPT, ranges)
    assert as_ranges(wanted) == ranges
    assert [each.parent for each in wanted[:3]] == [PROMPT.root, *PROMPT.names[:2]]
    assert as_ranges([wanted[0], wanted[2], wanted[4]]) == [
        PageRange("full", 0, 1),
        PageRange("full", 2, 1),
        PageRange("state", 2, 1),
    ]
