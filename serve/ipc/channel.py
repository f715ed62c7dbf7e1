"""Mailboxes between processes: ZeroMQ PULL and PUSH sockets in the run directory, msgspec on the wire.

A socket belongs to the thread that made it; another thread's call raises.
"""

import asyncio
import logging
import threading
from pathlib import Path

import zmq

from serve.ipc.messages import Message
from serve.ipc.run_paths import socket_path
from serve.ipc.wire import MalformedFrameError, decode, encode

MAX_QUEUED_MESSAGES = 100_000
# One call returns at most this many, so that a flood cannot keep its reader from everything else.
MAX_MESSAGES_A_CALL = 4096
RECONNECT_MS = 10
MAX_RECONNECT_MS = 200

logger = logging.getLogger(__name__)


class ChannelFullError(Exception):
    """The peer has not read for so long that its queue is full."""


class ChannelThreadError(Exception):
    """A thread used a socket of another thread."""


class _Owned:
    """Remembers the thread that made it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._owner = threading.get_ident()

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise ChannelThreadError(f"mailbox {self.name} is used outside the thread that made it")


class Inbox(_Owned):
    """The one mailbox of a process. num_malformed: frames dropped because they were no messages."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Raises SocketPathError, or zmq.ZMQError when the run directory is gone."""
        super().__init__(name)
        path = socket_path(run_dir, name)
        path.unlink(missing_ok=True)
        self.num_malformed = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def receive(self, timeout_s: float | None) -> list[Message]:
        """All messages that are there; waits up to `timeout_s` (None: for ever, 0: not at all) for a first one."""
        self._check_owner()
        messages = self._drain()
        if messages or timeout_s == 0:
            return messages
        self._poller.poll(None if timeout_s is None else max(1, round(timeout_s * 1000)))
        return self._drain()

    def add_wakeup(self, fd: int) -> None:
        """`receive` also returns (with what it has, maybe nothing) when `fd` is readable. Keep `fd` open as long."""
        self._check_owner()
        self._poller.register(fd, zmq.POLLIN)

    async def receive_async(self) -> list[Message]:
        """asyncio variant of `receive`: waits for at least one message."""
        self._check_owner()
        # ZeroMQ's descriptor tells of changes, not of a state: it may be readable without a message, and stay silent
        # with messages waiting. Reading until EAGAIN before each wait settles both.
        while not (messages := self._drain()):
            await self._wait_readable()
        return messages

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        fd = self._socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)

    def _drain(self) -> list[Message]:
        messages: list[Message] = []
        for _ in range(MAX_MESSAGES_A_CALL):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(decode(frame))
            except MalformedFrameError as error:
                self._count_malformed(error)
        return messages

    def _count_malformed(self, error: MalformedFrameError) -> None:
        self.num_malformed += 1
        if self.num_malformed & (self.num_malformed - 1) == 0:  # 1, 2, 4, 8, ...: a flood must not fill the log
            logger.error("mailbox %s dropped a malformed message (%d so far): %s", self.name, self.num_malformed, error)

    def close(self) -> None:
        """Unbind; ZeroMQ removes the socket file soon. Messages not yet received are lost."""
        self._check_owner()
        self._socket.close()


class Outbox(_Owned):
    """A way to one other process's mailbox; may be made before the mailbox exists."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Raises SocketPathError."""
        super().__init__(name)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        self._socket.connect(f"ipc://{socket_path(run_dir, name)}")

    def send(self, message: Message) -> None:
        """Never blocks; raises ChannelFullError."""
        self._check_owner()
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelFullError(f"mailbox {self.name} does not read") from error

    def close(self) -> None:
        """Messages that the peer has not taken yet are lost."""
        self._check_owner()
        self._socket.close()
