"""Every axis of a page's state allows the moves of its table and no other."""

import itertools

import pytest

from serve.multi_level_cache.page_state import (
    CONTENT_MOVES,
    DURABILITY_MOVES,
    DropReason,
    IllegalMoveError,
    PageKey,
    PageObject,
)
from serve.types import Durability, JobId, PageContent


def page(content: PageContent = PageContent.READY, durability: Durability = Durability.VOLATILE) -> PageObject:
    made = PageObject(PageKey(b"n" * 32, "full"), (1,), (1,), 0.0)
    made.content, made.durability = content, durability
    return made


@pytest.mark.parametrize(("source", "to"), list(itertools.product(PageContent, PageContent)))
def test_content_moves_by_its_table(source: PageContent, to: PageContent):
    made = page(source)
    if to in CONTENT_MOVES[source]:
        made.move_content(to, 5.0)
        assert (made.content, made.moved_at) == (to, 5.0)
    else:
        with pytest.raises(IllegalMoveError):
            made.move_content(to, 5.0)
        assert made.content is source


@pytest.mark.parametrize(("source", "to"), list(itertools.product(Durability, Durability)))
def test_durability_moves_by_its_table(source: Durability, to: Durability):
    made = page(durability=source)
    if to in DURABILITY_MOVES[source]:
        made.move_durability(to, 5.0)
        assert made.durability is to
    else:
        with pytest.raises(IllegalMoveError):
            made.move_durability(to, 5.0)


def test_only_ready_pages_are_pinned_and_pinned_bytes_stay():
    with pytest.raises(IllegalMoveError):
        page(PageContent.FILLING).pin(JobId(1, 1))
    made = page()
    made.pin(JobId(1, 1))
    with pytest.raises(IllegalMoveError):
        made.pin(JobId(1, 1))
    with pytest.raises(IllegalMoveError):
        made.unpin(JobId(1, 2))
    with pytest.raises(IllegalMoveError):
        made.move_content(PageContent.EMPTY, 0.0)
    made.doomed = DropReason.FLUSHED
    with pytest.raises(IllegalMoveError):
        made.pin(JobId(1, 3))
    made.unpin(JobId(1, 1))
    made.move_content(PageContent.EMPTY, 0.0)
