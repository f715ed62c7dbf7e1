"""A launcher with fake children as a process of its own, watched from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve.ipc.control import ControlClient, ControlError

ROOT = Path(__file__).parents[3]
FAKES = Path(__file__).parents[1] / "fakes"
DEADLINE_S = 30.0


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    pytest.fail(f"{what}: not within {timeout_s} s")


def value_of(event: dict[str, Any], name: str) -> Any:
    return event["facts"]["epoch"] if name == "fact_epoch" else event[name]


class FakeServer:
    """One launcher process. Its output goes to files, its children note events in `events`."""

    def __init__(self, home: Path, *flags: str, environment: dict[str, str], **behaviours: str) -> None:
        self.home = home
        self.run_dir = home / "run"
        self.events_path = home / "events"
        self.events_path.touch()
        given = "--run_dir" in flags
        command = [sys.executable, "-m", "varve_fakes.server", "fake", "--port", "0"]
        command += [] if given else ["--run_dir", str(self.run_dir)]
        renamed = {name.replace("_", "-"): behaviour for name, behaviour in behaviours.items()}
        self.process = subprocess.Popen(
            [*command, *flags],
            stdout=(home / "out").open("wb"),
            stderr=(home / "err").open("wb"),
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{FAKES}",
                "VARVE_FAKE": json.dumps(renamed),
                "VARVE_FAKE_EVENTS": str(self.events_path),
                **environment,
            },
            start_new_session=True,
        )

    @property
    def out(self) -> str:
        return (self.home / "out").read_text()

    @property
    def err(self) -> str:
        return (self.home / "err").read_text()

    def events(self, event: str, role: str = "", **facts: Any) -> list[dict[str, Any]]:
        """What children have noted, in order. fact_epoch: of the message, not of the child."""
        lines = [json.loads(line) for line in self.events_path.read_text().splitlines() if line.endswith("}")]
        return [
            line
            for line in lines
            if line["event"] == event
            and (not role or line["role"] == role)
            and all(value_of(line, name) == value for name, value in facts.items())
        ]

    def wait_event(self, event: str, role: str = "", count: int = 1, **facts: Any) -> list[dict[str, Any]]:
        def enough() -> list[dict[str, Any]] | None:
            found = self.events(event, role, **facts)
            return found if len(found) >= count else None

        found: list[dict[str, Any]] = wait_for(enough, f"{count} x {event} of {role or 'anybody'} {facts}\n{self.out}")
        return found

    def wait_ready(self) -> "FakeServer":
        wait_for(lambda: "Varve serves" in self.out or self.process.poll() is not None, f"start\n{self.out}{self.err}")
        assert self.process.poll() is None, self.out + self.err
        return self

    def wait_output(self, text: str) -> None:
        wait_for(lambda: text in self.out, f"{text!r} in the output\n{self.out}{self.err}")

    def control(self, method: str) -> Any:
        client = ControlClient(self.run_dir, "control-launcher")
        try:
            return client.call(method)
        finally:
            client.close()

    def child(self, role: str, index: int = 0) -> dict[str, Any]:
        """The living, ready child of a role, as the launcher lists it."""

        def find() -> dict[str, Any] | None:
            try:
                children: list[dict[str, Any]] = self.control("children")
            except ControlError:
                return None
            wanted = (role, index, "ready")
            return next((c for c in children if (c["role"], c["index"], c["status"]) == wanted), None)

        found: dict[str, Any] = wait_for(find, f"{role}-{index} is ready\n{self.out}")
        return found

    def kill_child(self, role: str, index: int = 0) -> int:
        pid: int = self.child(role, index)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait_exit(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end within {timeout_s} s\n{self.out}{self.err}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def clean(self) -> None:
        children = self.descendants()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie that nobody has reaped yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Starter:
    """`start("--tp", "2", worker="fail")` starts a launcher in a directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.servers: list[FakeServer] = []

    def __call__(self, *flags: str, environment: dict[str, str] | None = None, **behaviours: str) -> FakeServer:
        own = self.home / str(len(self.servers))
        own.mkdir()
        self.servers.append(FakeServer(own, *flags, environment=environment or {}, **behaviours))
        return self.servers[-1]

    def clean(self) -> None:
        for server in self.servers:
            server.clean()
        shutil.rmtree(self.home, ignore_errors=True)


def make_starter() -> Starter:
    return Starter(Path(tempfile.mkdtemp(prefix="vl-", dir="/tmp")))


@pytest.fixture
def start() -> Iterator[Starter]:
    starter = make_starter()
    yield starter
    starter.clean()


@pytest.fixture(scope="module")
def served() -> Iterator[FakeServer]:
    """One running server for all tests of a module: tp 2, two HTTP processes, a cache manager that notes events."""
    starter = make_starter()
    flags = ("--tp", "2", "--num_http_servers", "2", "--cpu_threads", "6")
    yield starter(*flags, environment={"VARVE_FAKE_CACHE": "1"}).wait_ready()
    starter.clean()
