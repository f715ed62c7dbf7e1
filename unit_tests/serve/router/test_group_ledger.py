"""Pages of one group: each is free, used or idle, and goes from one to the other by references and names alone."""

import pytest

from serve.router.group_ledger import GroupLedger
from serve.router.prefix_index import GroupSpec

NUM_PAGES = 6


@pytest.fixture
def ledger() -> GroupLedger:
    return GroupLedger(GroupSpec("full"), NUM_PAGES)


def named(ledger: GroupLedger, *names: bytes) -> list[int]:
    """Used pages with names."""
    pages = ledger.take(len(names))
    for page, name in zip(pages, names, strict=True):
        assert ledger.index.add(name, page)
    return pages


def counts(ledger: GroupLedger) -> tuple[int, int, int]:
    """Free, used, cached."""
    found = ledger.num_free, ledger.num_used, ledger.num_cached
    assert sum(found) == ledger.num_pages
    assert ledger.room == ledger.num_free + ledger.num_cached
    return found


def test_pages_are_given_once_and_come_back(ledger: GroupLedger):
    pages = ledger.take(4)
    assert len(set(pages)) == 4
    assert all(ledger.refs(page) == 1 for page in pages)
    assert counts(ledger) == (2, 4, 0)
    ledger.unref(pages)
    assert counts(ledger) == (6, 0, 0)
    assert ledger.check_integrity({}) == []


def test_the_page_that_came_back_last_is_given_first(ledger: GroupLedger):
    """Memory that was touched is used again before memory that was not."""
    pages = ledger.take(3)
    ledger.unref(pages)
    assert ledger.take(1) == [pages[0]]


def test_a_named_page_without_references_stays_and_can_be_used_again(ledger: GroupLedger):
    pages = named(ledger, b"a", b"b")
    ledger.unref(pages)
    assert counts(ledger) == (4, 0, 2)
    ledger.ref(pages[:1])
    assert counts(ledger) == (4, 1, 1)
    assert ledger.index.page(b"a") == pages[0]
    assert ledger.num_evicted == 0


def test_a_page_with_two_holders_is_used_until_both_have_let_go(ledger: GroupLedger):
    pages = named(ledger, b"a")
    ledger.ref(pages)
    ledger.unref(pages)
    assert (ledger.refs(pages[0]), counts(ledger)) == (1, (5, 1, 0))
    ledger.unref(pages)
    assert counts(ledger) == (5, 0, 1)


def test_eviction_takes_as_many_as_are_missing_children_before_parents(ledger: GroupLedger):
    old = named(ledger, b"a", b"ab", b"abc")
    young = named(ledger, b"x")
    ledger.unref(old)
    ledger.unref(young)
    assert counts(ledger) == (2, 0, 4)
    taken = ledger.take(4)
    assert set(taken) >= {old[2], old[1]}
    assert ledger.num_evicted == 2
    assert b"a" in ledger.index
    assert b"ab" not in ledger.index
    assert b"x" in ledger.index
    assert ledger.check_integrity(dict.fromkeys(taken, 1)) == []


def test_a_page_that_was_used_again_is_the_youngest(ledger: GroupLedger):
    first, second = named(ledger, b"a"), named(ledger, b"b")
    ledger.unref(first)
    ledger.unref(second)
    ledger.ref(first)
    ledger.unref(first)
    ledger.take(5)
    assert b"a" in ledger.index
    assert b"b" not in ledger.index


def test_a_forgotten_page_is_free_once_nobody_references_it(ledger: GroupLedger):
    used, idle = named(ledger, b"u"), named(ledger, b"i")
    ledger.unref(idle)
    for page in (*used, *idle):
        ledger.forget(page)
        ledger.forget(page)  # without a name nothing happens
    assert counts(ledger) == (5, 1, 0)
    assert len(ledger.index) == 0
    ledger.unref(used)
    assert counts(ledger) == (6, 0, 0)


def test_a_flush_frees_what_is_idle_and_unnames_what_is_used(ledger: GroupLedger):
    used = named(ledger, b"u")
    ledger.unref(named(ledger, b"i", b"j"))
    assert ledger.flush() == 2
    assert counts(ledger) == (5, 1, 0)
    assert b"u" not in ledger.index
    ledger.unref(used)
    assert counts(ledger) == (6, 0, 0)
    assert ledger.flush() == 0


def test_contradictions_in_the_books_are_found(ledger: GroupLedger):
    pages = ledger.take(2)
    assert ledger.check_integrity(dict.fromkeys(pages, 1)) == []
    (problem,) = ledger.check_integrity({pages[0]: 1})
    assert problem == f"group full: page {pages[1]} has 1 references but 0 holders"
    ledger._free.append(pages[0])
    assert any("free" in problem for problem in ledger.check_integrity(dict.fromkeys(pages, 1)))
