"""Hit policies against their definition."""

from hypothesis import given
from hypothesis import strategies as st

from models.state_layout import HitPolicy, StateGroup, StateKind
from serve.router.prefix_index import GroupSpec, PrefixIndex, first_needed, longest_legal

NAMES = [bytes([number]) for number in range(12)]


def index_with(present: set[int]) -> PrefixIndex:
    index = PrefixIndex()
    for number in present:
        index.add(NAMES[number], number)
    return index


def is_legal(spec: GroupSpec, present: set[int], length: int) -> bool:
    """The definition: all that a hit of `length` pages uses is there."""
    return all(number in present for number in range(first_needed(spec, length), length))


specs = st.one_of(
    st.just(GroupSpec("g")),
    st.integers(1, 5).map(lambda window: GroupSpec("g", HitPolicy.TRAILING_PAGES, window)),
    st.just(GroupSpec("g", HitPolicy.EXACT_CHECKPOINT)),
)


@given(specs, st.sets(st.integers(0, 11)), st.integers(0, 12))
def test_the_longest_legal_prefix_is_found(spec: GroupSpec, present: set[int], upto: int):
    best = max(length for length in range(upto + 1) if is_legal(spec, present, length))
    assert longest_legal(index_with(present), spec, NAMES, upto) == best


def test_a_window_that_begins_inside_a_page_needs_the_whole_page():
    group = StateGroup("w", StateKind.BOUNDED, HitPolicy.TRAILING_PAGES, 16, (), window_tokens=33)
    assert GroupSpec.of(group, 16) == GroupSpec("w", HitPolicy.TRAILING_PAGES, 3)


def test_a_name_keeps_its_page_and_a_page_its_name():
    index = PrefixIndex()
    assert index.add(b"a", 1)
    assert not index.add(b"a", 2)
    assert not index.add(b"b", 1)
    assert index.page(b"a") == 1
    assert index.name(1) == b"a"
    assert len(index) == 1
    assert index.check_integrity() == []


def test_a_broken_bijection_is_reported():
    index = PrefixIndex()
    index.add(b"a", 1)
    index._page_of[b"b"] = 1
    assert index.check_integrity()
