"""A queue of transfers and the one thread that works on them, in order."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from serve.ipc.wakeup import Wakeup
from serve.model_infer.transfer import Outcome, Transfer
from serve.types import JobResult

logger = logging.getLogger(__name__)


def run_guarded(run: Callable[[Transfer], Outcome], transfer: Transfer) -> Outcome:
    """Run a transfer to its outcome, whatever happens."""
    try:
        return run(transfer)
    except Exception as error:  # the job must get its answer, and the thread must live on for the next
        logger.warning("a %s failed", transfer.direction.value, exc_info=True)
        return Outcome(JobResult.FAILED, f"{type(error).__name__}: {error}")


class CopyStream:
    """`submit`, `take_back`, `poll_finished` and `close` on the owner's thread; `run` is called on this one's own.

    The thread sleeps while there is nothing to do, and sets `wakeup` at the end of each transfer.
    """

    def __init__(self, name: str, run: Callable[[Transfer], Outcome], wakeup: Wakeup, niceness: int = 0) -> None:
        """niceness: added to the process's for this thread alone."""
        self._run = run
        self._wakeup = wakeup
        self._niceness = niceness
        self._changed = threading.Condition()
        self._queue: deque[Transfer] = deque()
        self._finished: deque[tuple[Transfer, Outcome]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Behind all others."""
        with self._changed:
            self._queue.append(transfer)
            self._changed.notify()

    def take_back(self, transfer: Transfer) -> bool:
        """Remove a transfer that has not started; False when it has."""
        with self._changed:
            if transfer not in self._queue:
                return False
            self._queue.remove(transfer)
            return True

    def poll_finished(self) -> list[tuple[Transfer, Outcome]]:
        """Transfers that have ended since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self, timeout_s: float) -> bool:
        """End the thread after the batch at hand; what is queued never starts. False when it did not end in time."""
        with self._changed:
            self._is_closing = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._niceness:
            # On Linux the priority of a thread, not of its process.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + self._niceness)
        while (transfer := self._next()) is not None:
            outcome = run_guarded(self._run, transfer)
            self._finished.append((transfer, outcome))
            self._wakeup.set()

    def _next(self) -> Transfer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            return self._queue.popleft() if self._queue else None
