"""A real server for the tests that need one: all processes, real weights, loopback only."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve.ipc.control import ControlClient, ControlError

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 30.0


@dataclass
class Server:
    """A running `varve serve`. `url` has no trailing slash. start_s: seconds until it was ready first."""

    process: subprocess.Popen[bytes]
    url: str
    run_dir: Path
    log_path: Path
    model: str
    start_s: float = 0.0

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=httpx.Timeout(300.0), **options)

    def complete(self, prompt: Any, max_tokens: int, **options: Any) -> dict[str, Any]:
        """One greedy completion; the parsed body. Raises for any status but 200."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | options
        with self.client() as client:
            response = client.post("/v1/completions", json=body)
        response.raise_for_status()
        return dict(response.json())

    def children(self) -> list[psutil.Process]:
        """Living descendants of the launcher."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def child(self, role: str, index: int = 0) -> psutil.Process:
        """The living child of a role, told by its command line `-m serve.ipc.child ROLE INDEX FD`."""
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if role in line and line[line.index(role) + 1] == str(index):
                    return process
        raise LookupError(f"no {role} {index} is running")

    def control(self, name: str) -> ControlClient:
        """Control plane of `router`, `cache` or `worker-0`."""
        return ControlClient(self.run_dir, f"control-{name}")

    def wait_until_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until /readiness answers 200; fails with the log when the launcher ends or time runs out."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log_path.read_text()[-4000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readiness", timeout=2.0).status_code == 200:
                    return
            time.sleep(0.05)
        pytest.fail(f"not ready after {deadline_s} s:\n{self.log_path.read_text()[-4000:]}")

    def wait_until_idle(self, deadline_s: float = 20.0) -> dict[str, Any]:
        """Until the router has no request, no plan and no page in use; its statistics then."""
        end = time.monotonic() + deadline_s
        status: dict[str, Any] = {}
        while time.monotonic() < end:
            client = self.control("router")
            try:
                status = client.call("status")
            except ControlError:
                continue  # it is being restarted
            finally:
                client.close()
            if status["is_up"] and not status["num_requests"] and not status["num_plans_in_flight"]:
                return status
            time.sleep(0.05)
        pytest.fail(f"not idle after {deadline_s} s: {status}")

    def stop(self) -> int:
        """SIGTERM and wait; the exit code. Nothing may be left behind."""
        children = {child.pid: child for child in self.children()}
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"did not stop within {STOP_DEADLINE_S} s:\n{self.log_path.read_text()[-4000:]}")
        _, alive = psutil.wait_procs(list(children.values()), timeout=5)
        assert not alive, f"processes left after the stop: {alive}"
        assert not self.run_dir.exists(), "the run directory was left behind"
        return code


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(run_dir: Path, log_path: Path, model: str, *flags: str, **environment: str) -> Iterator[Server]:
    """`varve serve MODEL FLAGS` on a free port; ready when entered, stopped cleanly when left."""
    port = free_port()
    command = [sys.executable, "-m", "serve.cli", "serve", model, "--port", str(port), "--run_dir", str(run_dir)]
    command += flags
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
    server = Server(process, f"http://127.0.0.1:{port}", run_dir, log_path, model)
    began = time.monotonic()
    try:
        server.wait_until_ready()
        server.start_s = time.monotonic() - began
        with server.client() as client:
            server.model = client.get("/v1/models").json()["data"][0]["id"]
        yield server
    finally:
        if process.poll() is None:
            code = server.stop()
            assert code == 0, f"exit code {code}:\n{log_path.read_text()[-4000:]}"
        for child in server.children():
            child.kill()
