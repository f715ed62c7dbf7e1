"""Bytes of the disk tier: segment files, and the threads that read and write them.

Direct I/O where the file system has it, so that the cache does not push the machine's own file cache out; buffered
elsewhere. A transfer goes through the thread's own aligned buffer, where checksums are made of exactly what moves.
"""

import errno
import heapq
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serve.multi_level_cache.secondary_tier import Bytes

ALIGNMENT = 4096

logger = logging.getLogger(__name__)


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class ShortTransferError(OSError):
    """The file ended, or the disk took less than it was given."""


class SegmentFile:
    """One segment, open for reading and writing."""

    def __init__(self, path: Path, size: int) -> None:
        """Opens or makes the file and sets its size. Raises OSError."""
        self.path = path
        self.num_bytes = size
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.is_direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fd = os.open(path, flags, 0o600)
            self.is_direct = False
        if os.fstat(self._fd).st_size != size:
            os.ftruncate(self._fd, size)

    def read(self, buffers: Sequence[Bytes], offset: int) -> None:
        """Fill aligned buffers, one behind the other. Raises OSError."""
        self._whole(os.preadv(self._fd, buffers, offset), sum(map(len, buffers)))  # type: ignore[arg-type]

    def write(self, buffer: Bytes, offset: int) -> None:
        """Write an aligned buffer. Raises OSError."""
        self._whole(os.pwritev(self._fd, [buffer], offset), len(buffer))  # type: ignore[list-item]

    def sync(self) -> None:
        """What was written survives a crash of the machine. Raises OSError."""
        os.fdatasync(self._fd)

    def delete(self) -> None:
        """Close and unlink; a file that cannot be deleted is emptied by its next user."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    @staticmethod
    def _whole(count: int, num_bytes: int) -> None:
        if count != num_bytes:
            raise ShortTransferError(errno.EIO, f"{count} of {num_bytes} bytes")


@dataclass(order=True)
class _Task:
    priority: int
    number: int
    run: Callable[[Bytes], None] = field(compare=False)
    refuse: Callable[[], None] = field(compare=False)


class IoPool:
    """A few threads, each with an aligned buffer. Tasks of lower priority numbers go first."""

    def __init__(self, num_threads: int, buffer_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tasks: list[_Task] = []
        self._condition = threading.Condition()
        self._number = 0
        self._is_closing = False
        self._started: dict[int, float] = {}  # thread -> when its task began
        self._threads = [
            threading.Thread(target=self._run, args=(buffer_bytes,), name=f"disk-io-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, run: Callable[[Bytes], None], refuse: Callable[[], None]) -> None:
        """`run` is called with a thread's buffer, or else `refuse`, which may not raise: they tell their result.

        Should `run` raise without having told it, which only a mistake makes it do, `refuse` comes after it.
        """
        with self._condition:
            self._number += 1
            heapq.heappush(self._tasks, _Task(priority, self._number, run, refuse))
            self._condition.notify()

    def refuse_queued(self) -> None:
        """Give up what no thread has begun."""
        with self._condition:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.refuse()

    @property
    def num_queued(self) -> int:
        """Tasks that no thread has begun."""
        with self._condition:
            return len(self._tasks)

    def num_hung(self, timeout_s: float) -> int:
        """Tasks that have run for longer than `timeout_s`."""
        with self._condition:
            now = self._clock()
            return sum(now - started > timeout_s for started in self._started.values())

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then end the threads; False when one is still busy after `timeout_s`."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, buffer_bytes: int) -> None:
        buffer = np.frombuffer(mmap.mmap(-1, aligned(buffer_bytes)), dtype=np.uint8)
        thread = threading.get_ident()
        while True:
            with self._condition:
                while not self._tasks:
                    if self._is_closing:
                        return
                    self._condition.wait()
                task = heapq.heappop(self._tasks)
                self._started[thread] = self._clock()
            try:
                task.run(buffer)
            except Exception:  # the thread, and whoever waits for the result, must go on
                logger.exception("disk cache: a transfer is given up")
                task.refuse()
            finally:
                with self._condition:
                    del self._started[thread]
