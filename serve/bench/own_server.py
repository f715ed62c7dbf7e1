"""A server that a benchmark starts for itself: own port, own run directory, stopped with all that it made."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from serve.bench.flags import BenchError

STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True)
class BenchServer:
    """A running server. pid: of its launcher."""

    base_url: str
    run_dir: Path
    pid: int


@contextlib.contextmanager
def own_server(model: str, flags: Sequence[str], start_timeout_s: float) -> Iterator[BenchServer]:
    """`varve serve MODEL FLAGS`, ready. Raises BenchError with its own last line when it does not start."""
    with contextlib.ExitStack() as stack:
        # Sockets lie in the run directory: its path must be short.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vb-", ignore_cleanup_errors=True)))
        port, log = _free_port(), home / "log"
        command = [sys.executable, "-m", "serve.cli", "serve", model]
        command += ["--port", str(port), "--run_dir", str(home / "run"), *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        stack.callback(_stop, process)
        server = BenchServer(f"http://127.0.0.1:{port}", home / "run", process.pid)
        _wait_until_ready(process, server, log, start_timeout_s)
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: "subprocess.Popen[bytes]", server: BenchServer, log: Path, timeout_s: float) -> None:
    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"the server ended with {process.returncode}: {_last_line(log)}")
        with contextlib.suppress(URLError, OSError):
            opener.open(f"{server.base_url}/readiness", timeout=2.0).close()
            return
        time.sleep(_POLL_S)
    raise BenchError(f"the server is not ready after {timeout_s:g} s: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("varve: error: ") if lines else "it said nothing"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
