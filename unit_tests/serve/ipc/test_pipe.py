"""Frames over the line between launcher and child: cut right, whatever pieces they come in."""

import pytest

from serve.ipc.messages import EngineDown, Message, StopChild
from serve.ipc.pipe import LENGTH_BYTES, MAX_FRAME_BYTES, FrameBuffer, MessagePipe, PipeClosedError
from serve.ipc.wire import MalformedFrameError, encode

MESSAGES: list[Message] = [StopChild(1.5), EngineDown(3, "x" * 5000), StopChild(0.0)]


def framed(message: Message) -> bytes:
    frame = encode(message)
    return len(frame).to_bytes(LENGTH_BYTES, "little") + frame


@pytest.mark.parametrize("size", [1, 3, 4, 7, 1000, 100_000])
def test_messages_come_out_whole_and_in_order(size: int) -> None:
    stream, buffer = b"".join(framed(message) for message in MESSAGES), FrameBuffer()
    found = [message for start in range(0, len(stream), size) for message in buffer.feed(stream[start : start + size])]
    assert found == MESSAGES


def test_a_frame_of_impossible_length_is_an_error_at_once() -> None:
    with pytest.raises(MalformedFrameError, match=str(MAX_FRAME_BYTES + 1)):
        FrameBuffer().feed((MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "little"))


def test_a_frame_that_is_no_message_is_an_error() -> None:
    with pytest.raises(MalformedFrameError):
        FrameBuffer().feed((3).to_bytes(LENGTH_BYTES, "little") + b"\xc1\xc1\xc1")


def test_both_ends_hear_each_other_until_one_closes() -> None:
    ours, theirs_socket = MessagePipe.pair(send_timeout_s=5)
    theirs = MessagePipe(theirs_socket)
    for message in MESSAGES:
        ours.send(message)
    found: list[Message] = []
    while len(found) < len(MESSAGES):
        found += theirs.receive()
    assert found == MESSAGES
    theirs.send(StopChild(2.0))
    assert ours.receive() == [StopChild(2.0)]
    theirs.close()
    with pytest.raises(PipeClosedError):
        ours.receive()
    with pytest.raises(PipeClosedError):
        ours.send(StopChild(0.0))
    ours.close()
    assert ours.fileno() == -1


def test_a_reader_that_does_not_read_does_not_hang_the_sender() -> None:
    ours, theirs = MessagePipe.pair(send_timeout_s=0.05)
    with theirs, pytest.raises(PipeClosedError):
        ours.send(EngineDown(1, "x" * 10_000_000))
    ours.close()
