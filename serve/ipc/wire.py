"""Messages as bytes: one msgpack encoding for mailboxes and pipes."""

from typing import Any, Union

import msgspec

from serve.ipc.messages import Message

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(Message.__subclasses__())])  # noqa: UP007


class MalformedFrameError(Exception):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    """The message as one frame."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Raises MalformedFrameError."""
    try:
        message: Message = _decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise MalformedFrameError(f"frame of {len(frame)} bytes: {error}") from error
    return message
