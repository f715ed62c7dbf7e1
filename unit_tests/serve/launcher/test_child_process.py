"""One child from its start to its reaping, by a module of the tests."""

import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.messages import ChildFailed, ChildReady, Message, Progress, StopChild
from serve.ipc.process_control import GROUP_SIGNALS
from serve.launcher import child_process
from serve.launcher.child_process import ChildProcess, ChildSpec, ChildStatus

FAKES = Path(__file__).parents[1] / "fakes"
REPORTS, FAILS, CRASHES, COMPUTES = range(4)  # what `echo_child` does, by index

Spawn = Callable[..., ChildProcess]


@pytest.fixture
def spawn(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawn]:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    config = ResolvedConfig(
        serve=ServeConfig(model="none"),
        model_path=run_dir,
        model_name="none",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=64,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=4,
    )
    children: list[ChildProcess] = []

    def start(index: int, **changes: object) -> ChildProcess:
        spec = ChildSpec("worker", index, 3, "varve_fakes.echo_child", **changes)  # type: ignore[arg-type]
        children.append(ChildProcess.spawn(spec, config.model_dump_json().encode(), {"layers": 2}))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        wait_for_end(child)
        child.pipe.close()


def wait_for_end(child: ChildProcess) -> None:
    deadline = time.monotonic() + 20
    while not child.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def first_message(child: ChildProcess) -> Message:
    while True:
        assert select.select([child.pipe], [], [], 20)[0]
        messages = child.receive()
        assert messages is not None
        if messages:
            return messages[0]


def test_a_child_hears_what_it_is_and_ends_when_told(spawn: Spawn) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = spawn(REPORTS)
    assert (child.name, child.status, child.failure, child.info) == ("worker-0", ChildStatus.STARTING, None, {})
    ready = first_message(child)
    assert isinstance(ready, ChildReady)
    assert (ready.info["pid"], ready.info["epoch"], ready.info["model"]) == (child.pid, 3, {"layers": 2})
    assert ready.info["blocked"] == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert not set(GROUP_SIGNALS) & before
    child.send(StopChild(0))
    wait_for_end(child)
    child.ready_at = time.monotonic()
    assert child.describe_end() == "worker-0 ended with exit code 0"


def test_a_child_that_says_why_is_quoted(spawn: Spawn) -> None:
    child = spawn(FAILS)
    failed = first_message(child)
    assert isinstance(failed, ChildFailed)
    child.failure = failed.reason
    wait_for_end(child)
    assert child.describe_end() == "worker-1: the model has no weights"


def test_a_child_that_crashes_has_its_exit_code_told(spawn: Spawn, capfd: pytest.CaptureFixture[str]) -> None:
    child = spawn(CRASHES)
    while child.receive() is not None:
        pass
    wait_for_end(child)
    assert child.describe_end() == "worker-2 ended with exit code 1 before it was ready"
    assert "ZeroDivisionError: boom" in "".join(capfd.readouterr())


def test_a_killed_child_is_reaped_and_its_signal_told(spawn: Spawn) -> None:
    child = spawn(COMPUTES)
    assert isinstance(first_message(child), ChildReady)
    assert not child.has_ended()
    child.kill()
    wait_for_end(child)
    assert child.describe_end() == "worker-3 was killed by SIGKILL before it was ready (out of memory?)"
    child.ready_at = time.monotonic()
    assert child.describe_end() == "worker-3 was killed by SIGKILL"
    child.status = ChildStatus.ENDED
    child.kill()  # its pid may be another process's by now: nothing is sent


def test_a_child_that_does_not_read_is_killed(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "SEND_TIMEOUT_S", 0.1)
    child = spawn(COMPUTES)
    assert isinstance(first_message(child), ChildReady)
    child._process.send_signal(signal.SIGSTOP)
    for _ in range(100):
        child.send(Progress("worker", 3, "x" * 100_000, 0, 1))
        if child.has_ended():
            break
    wait_for_end(child)
    assert "SIGKILL" in child.describe_end()


def test_threads_are_the_child_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    environment = child_process._environment(ChildSpec("worker", 0, 1, "m", threads=3))
    assert {environment[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")} == {"3"}
