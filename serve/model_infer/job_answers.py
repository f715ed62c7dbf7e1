"""What a worker does with page jobs, and how it answers them."""

import logging
from collections.abc import Sequence
from typing import Protocol

from serve.ipc.channel import ChannelFullError, Outbox
from serve.ipc.messages import CancelJob, JobAnswer, LoadPages, Message, Resync, SlotsInUse, StorePages
from serve.types import JobId, JobResult

logger = logging.getLogger(__name__)


class PageJobs(Protocol):
    """Takes page jobs, and answers each exactly once. One thread, but for `has_held`, `inject` and `statistics`."""

    @property
    def has_held(self) -> bool:
        """Whether jobs wait for a step."""

    def submit(self, message: LoadPages | StorePages) -> None:
        """A job. A second one with the same id is ignored."""

    def cancel(self, message: CancelJob) -> None:
        """Stop what has not started; a job that has ended already is left alone."""

    def resync(self, message: Resync) -> None:
        """The cache manager has restarted and asks which slots are in use."""

    def complete_step(self, step: int) -> None:
        """A plan has run: its work is launched (CUDA) or done (CPU)."""

    def poll_finished(self) -> None:
        """Answer the jobs that have ended."""

    def fileno(self) -> int | None:
        """Becomes readable when `poll_finished` has something to do; None: never."""

    def statistics(self) -> dict[str, object]:
        """Counts, bytes and seconds as plain data."""

    def inject(self, faults: str) -> None:
        """Other faults from now on, as `--fault_inject` has them. Any thread may call."""

    def close(self) -> None:
        """End all threads; unanswered jobs stay so (the engine group ends)."""


class JobAnswerer:
    """Sends answers to the router and to the cache manager; on the thread that owns the mailboxes."""

    def __init__(self, rank: int, router: Outbox, cache: Outbox) -> None:
        self._rank = rank
        self._router = router
        self._cache = cache

    def answer(self, job: JobId, result: JobResult, detail: str = "", bad_slots: Sequence[int] = ()) -> None:
        """The one terminal answer of this rank. Raises ChannelFullError when the router does not read."""
        answer = JobAnswer(job, self._rank, result, detail, list(bad_slots))
        self._router.send(answer)
        self._tell_cache(answer)

    def tell_slots(self, nonce: int, jobs: Sequence[JobId], slots: Sequence[int]) -> None:
        """The answer to a Resync."""
        self._tell_cache(SlotsInUse(nonce, self._rank, list(jobs), list(slots)))

    def _tell_cache(self, message: Message) -> None:
        try:
            self._cache.send(message)
        except ChannelFullError as error:  # a cache that is stuck must not end the engine
            logger.warning("a %s is lost: %s", type(message).__name__, error)


class RefusedJobs:
    """The `PageJobs` of a server without a host tier: every job is refused, so that the router recomputes."""

    has_held = False

    def __init__(self, answerer: JobAnswerer) -> None:
        self._answerer = answerer

    def submit(self, message: LoadPages | StorePages) -> None:
        """A job: refused at once."""
        self._answerer.answer(message.job, JobResult.FAILED, "no host tier")

    def cancel(self, message: CancelJob) -> None:
        """The job has had its one answer already."""

    def resync(self, message: Resync) -> None:
        """No host slot is ever touched here."""
        self._answerer.tell_slots(message.nonce, [], [])

    def complete_step(self, step: int) -> None:
        """No job waits for a step."""

    def poll_finished(self) -> None:
        """Every job is answered when it comes."""

    def fileno(self) -> None:
        """Nothing happens in the background."""

    def statistics(self) -> dict[str, object]:
        """Nothing to count."""
        return {}

    def inject(self, faults: str) -> None:
        """Raises RuntimeError: nothing is copied that could fail."""
        raise RuntimeError("there is no host tier")

    def close(self) -> None:
        """No thread was started."""
