"""The private directory of one server: sockets, and a lock that tells the living from the dead.

The launcher holds a lock on `launcher.pid` for as long as it lives; the kernel drops it with the process, so that a
leftover is told from a living server without trusting process ids, which containers that share /tmp see differently.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from serve.errors import ConfigError
from serve.ipc.run_paths import MAX_SOCKET_PATH_BYTES

PID_FILE = "launcher.pid"
PREFIX = "varve-"
# The longest name of a socket in the directory, with separator and suffix, leaves this much for its own path.
MAX_PATH_BYTES = MAX_SOCKET_PATH_BYTES - len("/control-httpserver-63.sock")

logger = logging.getLogger(__name__)


class RunDirectory:
    """A directory that exists as long as its launcher. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Take over `path`, an existing empty directory."""
        self.path = path
        path.chmod(0o700)
        self._lock_fd = _write_pid_file(path)

    @classmethod
    def create(cls, requested: Path | None, environment: Mapping[str, str]) -> "RunDirectory":
        """A fresh directory, or the requested one. Removes what dead launchers have left. Raises ConfigError."""
        try:
            if requested is not None:
                return cls(_prepare_requested(requested.expanduser().absolute()))
            base = find_base(environment)
            remove_leftovers(base)
            return cls._make_in(base)
        except OSError as error:
            raise ConfigError(f"cannot make the run directory: {error}") from error

    @classmethod
    def _make_in(cls, base: Path) -> "RunDirectory":
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        try:
            return cls(path)
        except OSError:  # without its file nobody would ever know the directory for a leftover
            shutil.rmtree(path, ignore_errors=True)
            raise

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Delete the directory, then drop the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            logger.warning("the run directory %s could not be removed", self.path)
        os.close(self._lock_fd)


def find_base(environment: Mapping[str, str]) -> Path:
    """Where run directories go: $XDG_RUNTIME_DIR when it is usable and short, else /tmp."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and _is_usable(Path(runtime)) else Path("/tmp")


def _is_usable(base: Path) -> bool:
    longest = len(bytes(base)) + len(f"/{PREFIX}12345678")  # mkdtemp adds eight characters
    return longest <= MAX_PATH_BYTES and base.is_dir() and os.access(base, os.W_OK | os.X_OK)


def remove_leftovers(base: Path) -> list[Path]:
    """Delete run directories of this user whose launcher is dead; gives what was deleted."""
    removed = []
    for pid_file in base.glob(f"{PREFIX}*/{PID_FILE}"):
        if is_dead(pid_file):
            shutil.rmtree(pid_file.parent, ignore_errors=True)
            removed.append(pid_file.parent)
    return removed


def is_dead(pid_file: Path) -> bool:
    """Whether the launcher that wrote this file is gone; False for other users' files."""
    try:
        if pid_file.stat().st_uid != os.getuid():
            return False
        fd = os.open(pid_file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _prepare_requested(path: Path) -> Path:
    if len(bytes(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"--run_dir: {path} is too long for sockets, the limit is {MAX_PATH_BYTES} bytes")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    pid_file = path / PID_FILE
    if pid_file.exists():
        if not is_dead(pid_file):
            raise ConfigError(f"--run_dir: {path} belongs to a running server (process {_read_pid(pid_file)})")
        shutil.rmtree(path)
        path.mkdir(mode=0o700)
    if any(path.iterdir()):
        raise ConfigError(f"--run_dir: {path} is not empty")
    return path


def _read_pid(pid_file: Path) -> str:
    return (pid_file.read_text().split() or ["?"])[0]


def _write_pid_file(path: Path) -> int:
    """Write process id and start time (clock ticks after boot); gives the locked descriptor."""
    draft = path / f"{PID_FILE}.new"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    start_ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    os.write(fd, f"{os.getpid()} {start_ticks}\n".encode())
    # Locked before it has its name: whoever finds the file finds the lock.
    draft.rename(path / PID_FILE)
    return fd
