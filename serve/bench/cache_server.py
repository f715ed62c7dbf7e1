"""Servers that a benchmark starts for itself: own port, own run directory, stopped with all that they made."""

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from serve.bench.cache_options import CacheBenchOptions, Setup
from serve.bench.flags import BenchError

STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True)
class BenchServer:
    """A running server."""

    base_url: str
    run_dir: Path


def serve_command(options: CacheBenchOptions, setup: Setup, port: int, run_dir: Path, disk_dir: Path) -> list[str]:
    """The command line of a server with the tiers of a setup."""
    words = [sys.executable, "-m", "serve.cli", "serve", options.model, "--port", str(port), "--run_dir", str(run_dir)]
    words += ["--max_total_token_num", str(options.device_tokens)]
    if setup is not Setup.DEVICE:
        words += ["--enable_cpu_cache", "--cpu_cache_storage_size", str(options.cpu_cache_storage_size)]
    if setup is Setup.DISK:
        words += ["--enable_disk_cache", "--disk_cache_storage_size", str(options.disk_cache_storage_size)]
        words += ["--disk_cache_dir", str(disk_dir)]
    return words + shlex.split(options.serve_flags)


@contextlib.contextmanager
def running_server(options: CacheBenchOptions, setup: Setup) -> Iterator[BenchServer]:
    """A server that is ready. Raises BenchError with its own last line when it does not start."""
    try:
        where = tempfile.mkdtemp(prefix="varve-bench-", dir=options.disk_cache_dir)
    except OSError as error:
        raise BenchError(f"--disk_cache_dir {options.disk_cache_dir}: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        disk_dir = Path(where)
        stack.callback(_remove, disk_dir)
        # Sockets lie in the run directory: its path must be short, whatever the disk is called.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vb-", ignore_cleanup_errors=True)))
        port, log = _free_port(), home / "log"
        command = serve_command(options, setup, port, home / "run", disk_dir / "pages")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        stack.callback(_stop, process)
        server = BenchServer(f"http://127.0.0.1:{port}", home / "run")
        _wait_until_ready(process, server, log, options.start_timeout)
        yield server


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


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
