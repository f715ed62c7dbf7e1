from hypothesis import given
from hypothesis import strategies as st

from serve.httpserver.detokenizer import Detokenizer
from serve.httpserver.stop_strings import StopScanner, compile_stops

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [*BYTES, b"<special>", "😀".encode(), "中".encode(), "中".encode()[1:] + b"a"]


def cut(items: list[int], sizes: list[int]) -> list[list[int]]:
    """The items in pieces of the given sizes, then the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(items[at : at + size])
        at += size
    return [*pieces, items[at:]]


def test_a_character_over_tokens_comes_out_whole():
    detokenizer = Detokenizer(BYTES, frozenset())
    pieces = [detokenizer.feed([byte]) for byte in "a😀中".encode()]
    assert pieces == ["a", "", "", "", "😀", "", "", "中"]


def test_an_incomplete_end_is_dropped_and_an_impossible_byte_replaced():
    assert Detokenizer(BYTES, frozenset()).feed([*b"ok", *"😀".encode()[:3]]) == "ok"
    assert Detokenizer(BYTES, frozenset()).feed([0xFF, *b"ok"]) == "�ok"


def test_special_tokens_are_skipped_and_unknown_ids_empty():
    assert Detokenizer(WORDS, frozenset([256])).feed([97, 256, 98, 10_000]) == "ab"
    assert Detokenizer(WORDS, frozenset()).feed([97, 256]) == "a<special>"


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=40), st.lists(st.integers(0, 5), max_size=20))
def test_streamed_text_is_the_whole_text(tokens, sizes):
    whole = Detokenizer(WORDS, frozenset()).feed(tokens)
    stream = Detokenizer(WORDS, frozenset())
    assert "".join(stream.feed(piece) for piece in cut(tokens, sizes)) == whole


@given(st.text(max_size=30), st.lists(st.integers(0, 5), max_size=20))
def test_no_valid_text_gives_replacement_characters(text, sizes):
    stream = Detokenizer(BYTES, frozenset())
    assert "".join(stream.feed(piece) for piece in cut(list(text.encode()), sizes)) == text


def scan(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], bool]:
    scanner = StopScanner(compile_stops(stops), include)
    out = [scanner.feed(piece) for piece in pieces]
    return ([*out, scanner.flush()], scanner.stopped)


def test_a_stop_over_pieces_never_leaks():
    assert scan(["END"], ["abc E", "N", "D xyz"]) == (["abc ", "", "", ""], True)


def test_held_back_text_is_flushed():
    assert scan(["END"], ["abc E", "N"]) == (["abc ", "", "EN"], False)


def test_a_false_start_is_let_go_and_found_again():
    assert scan(["aab"], ["aa", "a", "b", "c"]) == (["", "a", "", "", ""], True)


def test_stop_in_the_first_piece():
    assert scan(["x"], ["xyz"]) == (["", ""], True)
    assert scan(["x"], ["xyz"], include=True) == (["x", ""], True)


def test_the_stop_that_is_complete_first_wins_and_the_longest_of_equals():
    assert scan(["abcd", "bc"], ["abcd"]) == (["a", ""], True)
    assert scan(["c", "abc"], ["xabc"]) == (["x", ""], True)


def reference(stops: list[str], text: str, include: bool) -> str:
    """The definition: the least end of any stop, then the longest stop with that end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))]
    return text


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.text("abc", max_size=40),
    st.lists(st.integers(0, 6), max_size=20),
    st.booleans(),
)
def test_pieces_do_not_change_where_text_stops(stops, text, sizes, include):
    pieces = ["".join(piece) for piece in cut(list(text), sizes)]
    out, _ = scan(stops, pieces, include)
    assert "".join(out) == reference(stops, text, include)
