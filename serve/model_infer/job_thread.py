"""The thread that takes page jobs: a load waits for no step, neither to begin nor to tell that it has ended."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from serve.ipc.channel import Inbox, Outbox
from serve.ipc.messages import CancelJob, LoadPages, Message, Resync, StorePages
from serve.ipc.wakeup import Wakeup
from serve.model_infer.errors import PlanError
from serve.model_infer.job_answers import JobAnswerer, PageJobs

_JOIN_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class JobThread:
    """Owner of a rank's mailbox for page jobs and of its `PageJobs`. The methods are the compute thread's to call.

    failure: a wakeup of the owner's mailbox, set when the thread has ended with an error, which `check` raises.
    """

    def __init__(self, run_dir: Path, rank: int, epoch: int, make_jobs: Callable[[JobAnswerer], PageJobs]) -> None:
        self.failure = Wakeup()
        self._run_dir, self._rank, self._epoch = run_dir, rank, epoch
        self._make_jobs = make_jobs
        self._jobs: PageJobs | None = None
        self._error: BaseException | None = None
        self._step = -1
        self._is_stopping = False
        self._wakeup = Wakeup()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page-jobs", daemon=True)
        self._thread.start()
        self._is_up.wait()
        self.check()

    def complete_step(self, step: int) -> None:
        """A plan has run: its work is launched (CUDA) or done (CPU). Wakes the thread only when a job waits for it."""
        # The step is written before it is asked whether anything waits; the thread does it the other way round.
        self._step = step
        if self._jobs is not None and self._jobs.has_held:
            self._wakeup.set()

    def check(self) -> None:
        """Raises what the thread ended with."""
        if self._error is not None:
            raise self._error

    def statistics(self) -> dict[str, object]:
        """Counts of the jobs, as plain data."""
        return self._jobs.statistics() if self._jobs is not None else {}

    def inject(self, faults: str) -> None:
        """Other faults from now on, as `--fault_inject` has them; for tests. Raises what `PageJobs.inject` raises."""
        if self._jobs is not None:
            self._jobs.inject(faults)

    def close(self) -> None:
        """End the thread after the message at hand, and the copies after their batch; unanswered jobs stay so."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the thread of page jobs does not end")
            return
        self._wakeup.close()
        self.failure.close()

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the compute thread raises it: the engine group ends
            self._error = error
            self._is_up.set()
            self.failure.set()

    def _serve(self) -> None:
        inbox = Inbox(self._run_dir, f"pages-{self._rank}.{self._epoch}")
        router, cache = Outbox(self._run_dir, f"router.{self._epoch}"), Outbox(self._run_dir, "cache")
        jobs = self._jobs = self._make_jobs(JobAnswerer(self._rank, router, cache))
        try:
            inbox.add_wakeup(self._wakeup.fileno())
            finished = jobs.fileno()
            if finished is not None:
                inbox.add_wakeup(finished)
            self._is_up.set()
            while not self._is_stopping:
                messages = inbox.receive(None)
                self._wakeup.clear()
                for message in messages:
                    _handle(jobs, message)
                jobs.complete_step(self._step)
                jobs.poll_finished()
        finally:
            jobs.close()
            for mailbox in (inbox, router, cache):
                mailbox.close()


def _handle(jobs: PageJobs, message: Message) -> None:
    if isinstance(message, LoadPages | StorePages):
        jobs.submit(message)
    elif isinstance(message, CancelJob):
        jobs.cancel(message)
    elif isinstance(message, Resync):
        jobs.resync(message)
    else:
        raise PlanError(f"a worker's page jobs have no use for {type(message).__name__}")
