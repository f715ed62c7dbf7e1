"""What holds for a whole test session: it leaves nothing behind."""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

MARK = "TEST_SESSION_MARK"
END_DEADLINE_S = 10.0
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""They serve this process and end with it."""


@pytest.fixture(scope="session", autouse=True)
def run_dir_base() -> Iterator[Path]:
    """Where servers of this session make run directories; at its end no process, directory or shared memory is left.

    Processes are told by a mark in their environment, so that sessions side by side do not see each other.
    """
    base, mark, shared = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp")), uuid.uuid4().hex, shared_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        patch.setenv(MARK, mark)
        yield base
    processes = wait_for_end(mark)
    for process in processes:
        process.kill()
    directories = [path.name for path in base.iterdir()]
    shutil.rmtree(base)
    assert not processes, "processes were left behind"
    assert not directories, "run directories were left behind"
    assert not shared_memory() - shared, "shared memory was left behind"


def wait_for_end(mark: str) -> list[psutil.Process]:
    """Descendants of this session, whoever their parent is now, that do not end soon."""
    deadline = time.monotonic() + END_DEADLINE_S
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def marked_processes(mark: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["environ", "cmdline"])
        if (process.info["environ"] or {}).get(MARK) == mark
        and process.pid != os.getpid()
        and not any(helper in word for word in process.info["cmdline"] or [] for helper in HELPERS)
    ]


def shared_memory() -> set[str]:
    """Names in /dev/shm that no process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        mapped.update(line.split("/dev/shm/", 1)[1] for line in lines if "/dev/shm/" in line)
    return {path.name for path in Path("/dev/shm").glob("*")} - mapped
