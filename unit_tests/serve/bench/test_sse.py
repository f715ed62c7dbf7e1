import msgspec
import pytest

from serve.bench.sse import decode_event, split_events

RAW = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]'
PAYLOADS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


@pytest.mark.parametrize("size", [*range(1, 12), len(RAW)])
def test_events_are_found_whatever_the_pieces(size: int) -> None:
    reads = [(float(i), RAW[i : i + size]) for i in range(0, len(RAW), size)]
    assert [payload for _, payload in split_events(reads)] == PAYLOADS


def test_an_event_has_the_time_of_the_piece_that_ends_it() -> None:
    reads = [(1.0, b"data: a"), (2.0, b"b\n\ndata: c\n"), (3.0, b"\ndata: d\n\n")]
    assert list(split_events(reads)) == [(2.0, b"ab"), (2.0, b"c"), (3.0, b"d")]


def test_no_pieces_are_no_events() -> None:
    assert list(split_events([])) == []


def test_unknown_fields_and_nulls_are_taken() -> None:
    event = decode_event(b'{"id": 1, "choices": [{"text": null, "logprobs": {}}], "usage": null}')
    assert event.choices[0].text is None


def test_what_is_no_event_raises() -> None:
    for payload in (b"{", b"[]", b'{"choices": [{"text": 5}]}'):
        with pytest.raises(msgspec.MsgspecError):
            decode_event(payload)
