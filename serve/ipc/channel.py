"""Mailboxes between processes: ZeroMQ PULL and PUSH sockets in the run directory, msgspec on the wire.

A socket belongs to the thread that made it; another thread's call raises.
"""

from pathlib import Path

from serve.ipc.messages import Message


class ChannelFullError(Exception):
    """The peer has not read for so long that its queue is full."""


class Inbox:
    """The one mailbox of a process."""

    def __init__(self, run_dir: Path, name: str) -> None:
        raise NotImplementedError

    def receive(self, timeout_s: float | None) -> list[Message]:
        """All messages that are there; waits up to `timeout_s` (None: for ever, 0: not at all) for a first one."""
        raise NotImplementedError

    def add_wakeup(self, fd: int) -> None:
        """`receive` also returns (with what it has, maybe nothing) when `fd` becomes readable."""
        raise NotImplementedError

    async def receive_async(self) -> list[Message]:
        """asyncio variant of `receive`: waits for at least one message."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Outbox:
    """A way to one other process's mailbox; may be made before the mailbox exists."""

    def __init__(self, run_dir: Path, name: str) -> None:
        raise NotImplementedError

    def send(self, message: Message) -> None:
        """Never blocks; raises ChannelFullError."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
