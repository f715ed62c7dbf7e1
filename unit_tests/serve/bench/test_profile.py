"""`varve bench profile` over a server that only looks like one: the same workload twice, recorded the second time."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve import cli
from serve.bench import profile
from serve.bench.own_server import BenchServer
from serve.ipc.control import ControlServer
from unit_tests.serve.bench.fake_server import FakeServer, Script, plain, stream

STEPS = {
    kind: {"steps": 2, "tokens": 9, "phases": {"forward": 0.02}, "kernels": {"linear": [4, 0.012]}}
    for kind in ("prefill", "decode")
}


class Worker:
    """The worker's control socket, answered by a thread."""

    def __init__(self, run_dir: Path) -> None:
        self.calls: list[str] = []
        self._server = ControlServer(
            run_dir, "control-worker-0", {"profile_start": self._start, "profile_stop": self._stop}
        )
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _start(self) -> None:
        self.calls.append("start")

    def _stop(self) -> dict[str, Any]:
        self.calls.append("stop")
        return STEPS

    def _run(self) -> None:
        while not self._ends.wait(0.01):
            self._server.run_pending()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._server.close()


@pytest.fixture
def worker(run_dir: Path) -> Iterator[Worker]:
    made = Worker(run_dir)
    yield made
    made.close()


def test_the_second_run_is_recorded_and_both_are_reported(
    worker: Worker, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[tuple[int, ...]] = []

    def respond(path: str, body: dict[str, Any]) -> Script:
        if path == "/metrics":
            count = float(len(prompts))
            text = f"varve_http_prepare_seconds_sum {count * 0.001}\nvarve_http_prepare_seconds_count {count}\n"
            return plain("200 OK", text.encode())
        if path == "/v1/models":
            return plain("200 OK", b'{"data": [{"id": "fake"}]}')
        worker.calls.append("request")
        prompts.append(tuple(body["prompt"]))
        return stream(body["max_tokens"], 0.01, 0.001, None)

    with FakeServer(respond) as server:

        @contextlib.contextmanager
        def own_server(model: str, flags: list[str], start_timeout_s: float) -> Iterator[BenchServer]:
            assert (model, flags) == ("tiny", ["--tp", "2"])
            yield BenchServer(server.base_url, run_dir, os.getpid())

        monkeypatch.setattr(profile, "own_server", own_server)
        file = tmp_path / "profile.json"
        words = ["bench", "profile", "--model", "tiny", "--repeat", "2", "--serve_flags", "--tp 2", "--json", str(file)]
        assert cli.main([*words, "--vocab_size", "100"]) == 0
    assert worker.calls == ["request"] * 3 + ["start"] + ["request"] * 2 + ["stop"]  # the first is the warm-up
    assert len(set(prompts)) == 5
    assert all(len(prompt) == 512 and max(prompt) < 100 for prompt in prompts[1:])
    text = capsys.readouterr().out
    assert "kernel linear" in text
    assert "without the profiler: first token" in text
    data = json.loads(file.read_text())
    assert data["breakdown"]["a token"]["kernel linear"] == pytest.approx(6)
    assert data["measured"]["metrics"]["varve_http_prepare_seconds_count"] == 2
    assert data["breakdown"]["first token"]["HTTP process: body, tokens, page names"] == pytest.approx(1)


def test_a_worker_that_does_not_answer_is_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(path: str, body: dict[str, Any]) -> Script:
        if path == "/metrics":
            return plain("200 OK", b"")
        return plain("200 OK", b'{"data": [{"id": "fake"}]}') if path == "/v1/models" else stream(2, 0.0, 0.0, None)

    with FakeServer(respond) as server:

        @contextlib.contextmanager
        def own_server(*_: object) -> Iterator[BenchServer]:
            yield BenchServer(server.base_url, run_dir, os.getpid())

        monkeypatch.setattr(profile, "own_server", own_server)
        assert cli.main(["bench", "profile", "--repeat", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("varve: error: the worker cannot be profiled: control-worker-0 does not answer")
    assert error.count("\n") == 1
