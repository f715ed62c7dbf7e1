import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rpyc

from serve.ipc.control import PROTOCOL, ControlClient, ControlError, ControlServer


class Owner:
    """A thread that owns some state and answers control calls between other work."""

    def __init__(self, run_dir: Path) -> None:
        self.threads: list[int] = []
        self.server = ControlServer(
            run_dir, "control-router", {"status": self.status, "echo": self.echo, "fail": self.fail, "odd": object}
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.ident = self._thread.ident

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.server.run_pending()

    def status(self) -> dict[str, Any]:
        self.threads.append(threading.get_ident())
        return {"pages": {1: 2, "free": [1, 2.5, None, b"raw"]}}

    def echo(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise KeyError("no\nsuch page")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def owner(run_dir: Path) -> Iterator[Owner]:
    running = Owner(run_dir)
    yield running
    running.stop()
    running.server.close()


def test_a_call_runs_on_the_owners_thread_and_gives_plain_data(owner: Owner, run_dir: Path) -> None:
    client = ControlClient(run_dir, "control-router")
    assert client.call("status") == {"pages": {1: 2, "free": [1, 2.5, None, b"raw"]}}
    assert client.call("echo", value=[1, "two"]) == [1, "two"]
    assert owner.threads == [owner.ident]
    client.close()


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("fail", {}, "KeyError: 'no.*such page'"),
        ("missing", {}, "has no method 'missing', it has: echo, fail, odd, process, status"),
        ("echo", {"wrong": 1}, "unexpected keyword argument 'wrong'"),
        ("odd", {}, "object"),
    ],
)
def test_failures_come_back_as_one_line(
    owner: Owner, run_dir: Path, method: str, arguments: dict[str, Any], message: str
) -> None:
    client = ControlClient(run_dir, "control-router")
    with pytest.raises(ControlError, match=message) as caught:
        client.call(method, **arguments)
    assert "\n" not in str(caught.value)
    assert client.call("echo", value=1) == 1
    client.close()


def test_an_absent_peer_is_an_error(run_dir: Path) -> None:
    with pytest.raises(ControlError, match="control-cache-0 does not answer"):
        ControlClient(run_dir, "control-cache-0").call("status")


def test_a_call_that_outlasts_its_client_is_not_said_to_have_never_run(run_dir: Path) -> None:
    runs, ends = threading.Event(), threading.Event()

    def linger() -> None:
        runs.set()
        ends.wait(10)

    server = ControlServer(run_dir, "control-cache", {"flush": linger})

    def own() -> None:
        while not runs.is_set():
            server.run_pending()

    owner = threading.Thread(target=own)
    owner.start()
    client = ControlClient(run_dir, "control-cache", timeout_s=0.3)
    with pytest.raises(ControlError, match="goes on with it"):
        client.call("flush")
    ends.set()
    owner.join()
    client.close()
    server.close()


def test_a_busy_owner_is_an_error_and_the_late_call_never_runs(run_dir: Path) -> None:
    calls: list[int] = []
    server = ControlServer(run_dir, "control-worker-0", {"note": lambda: calls.append(1)})
    client = ControlClient(run_dir, "control-worker-0", timeout_s=0.2)
    with pytest.raises(ControlError, match="too busy"):
        client.call("note")
    server.run_pending()
    assert calls == []
    client.close()
    server.close()


def test_a_peer_that_never_answers_is_an_error(run_dir: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "control-router.sock"))
    listener.listen()
    with pytest.raises(ControlError, match="did not answer"):
        ControlClient(run_dir, "control-router", timeout_s=0.1).call("status")
    listener.close()


def test_a_client_finds_a_restarted_peer(run_dir: Path) -> None:
    client = ControlClient(run_dir, "control-router")
    for _ in range(2):
        owner = Owner(run_dir)
        deadline = time.monotonic() + 5
        while True:
            try:
                assert client.call("echo", value=3) == 3
                break
            except ControlError:
                assert time.monotonic() < deadline
        owner.stop()
        owner.server.close()
    with pytest.raises(ControlError, match="does not answer"):
        client.call("echo", value=3)


def test_nothing_but_the_one_method_is_reachable(owner: Owner, run_dir: Path) -> None:
    connection = rpyc.utils.factory.unix_connect(str(run_dir / "control-router.sock"), config=dict(PROTOCOL))
    root = connection.root
    for target, name in (
        (root, "_submit"),
        (root.call, "__globals__"),
        (root.call, "__func__"),
        (root.call, "im_self"),
    ):
        with pytest.raises(AttributeError):
            getattr(target, name)
    with pytest.raises(AttributeError):
        root.call = 1
    connection.close()


def test_closing_under_a_connected_client_is_quiet(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        for _ in range(5):
            owner = Owner(run_dir)
            client = ControlClient(run_dir, "control-router")
            client.call("status")
            owner.stop()
            owner.server.close()
            time.sleep(0.02)
            client.close()
    finally:
        threading.excepthook = hook
    assert errors == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_descriptor_is_readable_while_a_call_waits(run_dir: Path) -> None:
    server = ControlServer(run_dir, "control-cache-0", {"ping": lambda: "pong"})
    answers: list[Any] = []
    caller = threading.Thread(
        target=lambda: answers.append(ControlClient(run_dir, "control-cache-0").call("ping")), daemon=True
    )
    caller.start()
    assert select.select([server], [], [], 5)[0]
    server.run_pending()
    caller.join(5)
    assert answers == ["pong"]
    assert not select.select([server], [], [], 0)[0]
    server.close()
    assert not (run_dir / "control-cache-0.sock").exists()
