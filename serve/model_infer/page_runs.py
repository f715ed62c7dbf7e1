"""Pages of a job, and which of them follow each other on both sides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageObject:
    """One page to move: its device page, host slots in the order of its bytes, and their generations."""

    page: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True)
class PageRun:
    """Objects whose device pages follow each other, and so do their host slots.

    Object i has page `first_page + i`; its j-th slot is `slots[j] + i * len(slots)`.
    """

    first_page: int
    slots: tuple[int, ...]
    count: int


def page_runs(objects: Sequence[PageObject]) -> Iterator[tuple[int, PageRun]]:
    """The objects in order, those together that follow each other on both sides: (index of the first, run)."""
    start = 0
    for index in range(1, len(objects) + 1):
        if index == len(objects) or not _follows(objects[index - 1], objects[index]):
            yield start, PageRun(objects[start].page, objects[start].slots, index - start)
            start = index


def _follows(first: PageObject, second: PageObject) -> bool:
    step = len(first.slots)
    return second.page == first.page + 1 and second.slots == tuple(slot + step for slot in first.slots)
