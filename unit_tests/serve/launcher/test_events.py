"""The launcher's loop: callbacks for what is readable, and signals that are counted instead of acting."""

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from serve.launcher.events import EventLoop, StopRequestedError, raise_stop, stop_signals


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_who_is_readable_is_called_and_nobody_else(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    heard: list[bytes] = []
    with EventLoop() as events:
        events.watch(ours, lambda: heard.append(ours.recv(10)))
        events.watch(theirs, lambda: heard.append(b"never"))
        events.run_once(0)
        assert heard == []
        theirs.send(b"hello")
        events.run_once(5)
        assert heard == [b"hello"]
        events.unwatch(ours)
        theirs.send(b"again")
        events.run_once(0)
        assert heard == [b"hello"]


def test_a_callback_may_take_another_one_away(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    called: list[str] = []
    with EventLoop() as events:

        def stop_watching(name: str) -> None:
            called.append(name)
            for end in (ours, theirs):
                events.unwatch(end)

        events.watch(ours, lambda: stop_watching("ours"))
        events.watch(theirs, lambda: stop_watching("theirs"))
        ours.send(b"x")
        theirs.send(b"x")
        events.run_once(5)
        assert len(called) == 1


def test_a_wait_ends_in_time() -> None:
    with EventLoop() as events:
        began = time.monotonic()
        events.run_once(0.05)
        events.run_once(-1)
        assert 0.04 < time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_stop_are_counted_and_end_the_wait(number: signal.Signals) -> None:
    with EventLoop() as events:
        for _ in range(2):
            os.kill(os.getpid(), number)
            events.run_once(5)
        assert events.num_stops == 2


def test_the_end_of_a_child_ends_the_wait_and_is_no_stop() -> None:
    with EventLoop() as events:
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        began = time.monotonic()
        events.run_once(20)
        assert time.monotonic() - began < 15
        assert events.num_stops == 0
        os.waitpid(pid, 0)


def test_handlers_are_those_of_before_afterwards() -> None:
    before = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGCHLD)}
    with EventLoop():
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_terminal_that_closes_stops_a_server_unless_it_runs_under_nohup() -> None:
    assert signal.SIGHUP in stop_signals()
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_outside_of_the_loop_a_signal_raises() -> None:
    previous = signal.signal(signal.SIGTERM, raise_stop)
    try:
        with pytest.raises(StopRequestedError):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)
