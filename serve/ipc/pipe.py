"""Framed messages over a stream socket: the line between the launcher and one child."""

import socket
import threading

from serve.ipc.messages import Message
from serve.ipc.wire import MalformedFrameError, decode, encode

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 64 << 20
_READ_BYTES = 1 << 16


class PipeClosedError(Exception):
    """The other end has closed, or does not read."""


class FrameBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by `data`. Raises MalformedFrameError, after which the stream is useless."""
        self._pending += data
        messages = []
        while (frame := self._next_frame()) is not None:
            messages.append(decode(frame))
        return messages

    def _next_frame(self) -> bytes | None:
        if len(self._pending) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._pending[:LENGTH_BYTES], "little")
        if length > MAX_FRAME_BYTES:
            raise MalformedFrameError(f"frame of {length} bytes")
        end = LENGTH_BYTES + length
        if len(self._pending) < end:
            return None
        frame = bytes(self._pending[LENGTH_BYTES:end])
        del self._pending[:end]
        return frame


class MessagePipe:
    """One end of the line. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = FrameBuffer()
        self._send_lock = threading.Lock()

    @classmethod
    def pair(cls, send_timeout_s: float) -> tuple["MessagePipe", socket.socket]:
        """The launcher's end, whose `send` gives up after `send_timeout_s`, and the socket for the child."""
        ours, theirs = socket.socketpair()
        ours.settimeout(send_timeout_s)
        return cls(ours), theirs

    def send(self, message: Message) -> None:
        """Raises PipeClosedError."""
        frame = encode(message)
        try:
            with self._send_lock:
                self._socket.sendall(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
        except OSError as error:
            raise PipeClosedError(str(error)) from error

    def receive(self) -> list[Message]:
        """Read once, blocking unless readable; maybe no message is complete yet.

        Raises PipeClosedError at the end of the stream, MalformedFrameError when it is damaged.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise PipeClosedError(str(error)) from error
        if not data:
            raise PipeClosedError("closed")
        return self._buffer.feed(data)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other end sees the end of the stream."""
        self._socket.close()
