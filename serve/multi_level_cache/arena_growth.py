"""Backs the arena with memory step by step in a thread of its own, so that serving starts before all of it is there."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from serve.ipc.wakeup import Wakeup
from serve.multi_level_cache.memory_limits import available_bytes

STEP_BYTES = 1 << 30
HEADROOM_BYTES = 1 << 30
_HEADROOM_SHARE = 0.05


def default_room() -> int:
    """Bytes that the arena may still take: what is available less a headroom for everybody else."""
    available = available_bytes()
    return available - max(HEADROOM_BYTES, int(available * _HEADROOM_SHARE))


@dataclass(frozen=True)
class Growth:
    """How far the arena has grown. reason: why it stopped short of its size, one line."""

    backed_bytes: int
    is_finished: bool
    reason: str | None = None


class ArenaGrower:
    """fallocates bytes [start, start + size) of a memfd segment in steps while `room` has enough.

    `poll_finished` on the owner's thread.
    """

    def __init__(
        self,
        fd: int,
        start: int,
        size: int,
        step_bytes: int = STEP_BYTES,
        room: Callable[[], int] = default_room,
        allocate: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        self._fd, self._start, self._size, self._step_bytes = fd, start, size, step_bytes
        self._room, self._allocate = room, allocate
        self._news: list[Growth] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="arena-grower", daemon=True)

    def start(self) -> None:
        """Begin to allocate."""
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `poll_finished` has something new."""
        return self._wakeup.fileno()

    def poll_finished(self) -> Growth | None:
        """The newest state, once; None when nothing has changed."""
        self._wakeup.clear()
        with self._lock:
            news, self._news = self._news, []
        return news[-1] if news else None

    def close(self) -> None:
        """Stop after the step in progress."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        backed = 0
        while backed < self._size and not self._stopping.is_set():
            step = min(self._step_bytes, self._size - backed)
            reason = self._refusal(step) or self._try_allocate(self._start + backed, step)
            if reason is not None:
                wanted, got = self._size / 2**30, backed / 2**30
                self._tell(Growth(backed, True, f"CPU cache: {got:.2f} GiB instead of {wanted:.2f} GiB: {reason}"))
                return
            backed += step
            self._tell(Growth(backed, backed == self._size))

    def _refusal(self, step: int) -> str | None:
        room = self._room()
        return None if room >= step else f"only {max(room, 0) / 2**30:.2f} GiB of memory may still be taken"

    def _try_allocate(self, start: int, step: int) -> str | None:
        try:
            self._allocate(self._fd, start, step)
        except OSError as error:
            return f"the system refuses ({error.strerror})"
        return None

    def _tell(self, growth: Growth) -> None:
        with self._lock:
            self._news.append(growth)
        self._wakeup.set()
