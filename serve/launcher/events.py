"""The launcher's event loop: file descriptors and signals, on one thread."""

import logging
import selectors
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from serve.ipc.process_control import GROUP_SIGNALS

logger = logging.getLogger(__name__)


class HasFileno(Protocol):
    """Anything with a file descriptor."""

    def fileno(self) -> int: ...


class StopRequestedError(Exception):
    """A signal to stop came while the launcher was not in its event loop."""


def raise_stop(number: int, frame: FrameType | None) -> None:
    """Signal handler for phases that block, such as fetching a model."""
    raise StopRequestedError


def stop_signals() -> list[signal.Signals]:
    """What stops a server: SIGINT, SIGTERM, and SIGHUP unless it was started under nohup."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in GROUP_SIGNALS if not (under_nohup and number is signal.SIGHUP)]


class EventLoop:
    """Calls back when descriptors are readable. num_stops: signals to stop so far. SIGCHLD ends a wait.

    A context manager; signal handlers are installed inside. For the main thread.
    """

    def __init__(self) -> None:
        self.num_stops = 0
        self._selector = selectors.DefaultSelector()
        self._signal_reader, self._signal_writer = socket.socketpair()
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "EventLoop":
        for end in (self._signal_reader, self._signal_writer):
            end.setblocking(False)
        self.watch(self._signal_reader, self._on_signals)
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        for number in (*stop_signals(), signal.SIGCHLD):
            self._previous[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._selector.close()
        self._signal_reader.close()
        self._signal_writer.close()

    def watch(self, source: HasFileno, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def unwatch(self, source: HasFileno) -> None:
        """Undo `watch`; before the source is closed."""
        self._selector.unregister(source)

    def run_once(self, timeout_s: float) -> None:
        """Wait for something, at most `timeout_s`, and call back for all that is readable."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            # A callback before may have stopped watching this one.
            if key.fd in self._selector.get_map():
                key.data()

    def _on_signals(self) -> None:
        for number in self._signal_reader.recv(4096):
            if number in GROUP_SIGNALS:
                self.num_stops += 1
                logger.info("received %s", signal.Signals(number).name)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The number arrives through the wakeup descriptor; a handler must exist for that."""
