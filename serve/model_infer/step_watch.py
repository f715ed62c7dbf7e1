"""Tells a loop that sleeps on its mailbox that a step on the device has ended."""

import queue
import threading

from serve.ipc.wakeup import Wakeup
from serve.model_infer.readback import Readback


class StepWatch:
    """`submit`, `clear` and `close` on the owner's thread; a thread of its own, made when first needed, waits."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._queue: queue.SimpleQueue[Readback | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, end: Readback) -> None:
        """Make `fileno` readable when this is done, in the order of the calls."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="step-watch", daemon=True)
            self._thread.start()
        self._queue.put(end)

    def fileno(self) -> int:
        """For the mailbox's poller."""
        return self._wakeup.fileno()

    def clear(self) -> None:
        """Not readable until another step ends; look for finished steps after this, not before."""
        self._wakeup.clear()

    def close(self) -> None:
        """End the thread; waits for the step at hand."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5.0)
            if self._thread.is_alive():
                return  # a step that never ends: the process is about to be killed
        self._wakeup.close()

    def _work(self) -> None:
        while (end := self._queue.get()) is not None:
            try:
                end.wait()
            except RuntimeError:
                pass  # the owner asks as well, and gets the same error
            self._wakeup.set()
