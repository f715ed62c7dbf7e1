"""One child process, as the launcher sees it."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import serve
from serve.errors import LaunchError
from serve.ipc.messages import ChildStart, Message, Progress
from serve.ipc.pipe import MessagePipe, PipeClosedError
from serve.ipc.process_control import GROUP_SIGNALS
from serve.ipc.wire import MalformedFrameError

SEND_TIMEOUT_S = 5.0


class ChildStatus(Enum):
    """STARTING until ChildReady; ENDED once reaped."""

    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True)
class ChildSpec:
    """What to start. fds: inherited descriptors by name; threads: for OpenMP and its like."""

    role: str
    index: int
    epoch: int
    module: str
    fds: dict[str, int] = field(default_factory=dict)
    threads: int = 1
    restarts: int = 0

    @property
    def name(self) -> str:
        """`worker-0`."""
        return f"{self.role}-{self.index}"


class ChildProcess:
    """A child from its start to its reaping.

    info: of ChildReady; failure: the line of ChildFailed; progress: the last one told.
    """

    def __init__(self, spec: ChildSpec, process: "subprocess.Popen[bytes]", pipe: MessagePipe) -> None:
        self.spec = spec
        self.name = spec.name
        self.pid = process.pid
        self.pipe = pipe
        self.status = ChildStatus.STARTING
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.info: dict[str, object] = {}
        self.failure: str | None = None
        self.progress: Progress | None = None
        self._process = process

    @classmethod
    def spawn(cls, spec: ChildSpec, config_json: bytes, model: dict[str, object]) -> "ChildProcess":
        """Start the child and hand it ChildStart. Raises LaunchError when the system gives no process.

        Call from the main thread: the child dies with its thread.
        """
        pipe, theirs = MessagePipe.pair(SEND_TIMEOUT_S)
        # The child inherits the mask and ignores these signals before it unblocks them, so that a Ctrl-C at any moment
        # reaches only the launcher.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            with theirs:
                process = subprocess.Popen(
                    _command(spec, theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *spec.fds.values()],
                    env=_environment(spec),
                )
        except OSError as error:
            pipe.close()
            raise LaunchError(f"{spec.name} cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        child = cls(spec, process, pipe)
        child.send(ChildStart(spec.epoch, config_json, model, spec.fds, spec.module, spec.restarts))
        return child

    def send(self, message: Message) -> None:
        """A child that is gone, or that does not read for seconds, is killed; its end is then noticed as usual."""
        try:
            self.pipe.send(message)
        except PipeClosedError:
            self.kill()

    def receive(self) -> list[Message] | None:
        """What has come; call when the pipe is readable. None: the line is closed or damaged, nothing will come."""
        try:
            return self.pipe.receive()
        except (PipeClosedError, MalformedFrameError):
            return None

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.status is not ChildStatus.ENDED:
            self._process.kill()

    def has_ended(self) -> bool:
        """Whether the child has exited; reaps it."""
        return self._process.poll() is not None

    def describe_end(self) -> str:
        """Why it ended, as one line; its own words when it had any."""
        if self.failure is not None:
            return f"{self.name}: {self.failure}"
        code = self._process.returncode
        when = "" if self.ready_at else " before it was ready"
        if code is None or code >= 0:
            return f"{self.name} ended with exit code {code}{when}"
        hint = " (out of memory?)" if -code == signal.SIGKILL and not self.ready_at else ""
        return f"{self.name} was killed by {signal.Signals(-code).name}{when}{hint}"


def _command(spec: ChildSpec, fd: int) -> list[str]:
    # -P: the directory that the user happens to stand in must not shadow modules.
    return [sys.executable, "-P", "-m", "serve.ipc.child", spec.role, str(spec.index), str(fd)]


def _environment(spec: ChildSpec) -> dict[str, str]:
    threads = {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    # Threads of torch's own pool must not spin after an operation: they would hold the cores of the kernels' threads.
    return {**os.environ, **threads, "GOMP_SPINCOUNT": "0", **_python_path()}


def _python_path() -> dict[str, str]:
    """PYTHONPATH for a source tree that is not installed; an installed package is found without."""
    root = Path(serve.__file__).resolve().parents[1]
    if root == Path(sysconfig.get_path("purelib")).resolve():
        return {}
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else str(root)}
