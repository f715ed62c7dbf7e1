"""Stop strings against a search in the whole text, however it is cut into pieces."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.httpserver.stop_strings import StopScanner, compile_stops

TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop string) of the one that is complete first, the longest of those at the same character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(TEXT, STOPS, st.lists(st.integers(0, 24), max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_pieces_give_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int], include_stop: bool):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    scanner = StopScanner(compile_stops(stops), include_stop)
    out = "".join(scanner.feed(text[start:end]) for start, end in pairwise(edges))
    found = expected(text, stops)
    assert scanner.stopped == (found is not None)
    if found is None:
        assert out + scanner.flush() == text
        return
    end, stop = found
    assert scanner.stop_text == stop
    assert out == text[: end if include_stop else end - len(stop)]
    assert scanner.flush() == ""
    assert scanner.feed("more") == ""


def test_only_what_may_become_a_stop_string_is_held_back():
    scanner = StopScanner(compile_stops(["END"]), False)
    assert [scanner.feed(piece) for piece in ("tEN", "x", "E", "N", "D!")] == ["t", "ENx", "", "", ""]
