"""Load and store jobs on their way: from `Begin` until every rank has answered."""

from collections.abc import Callable
from dataclasses import dataclass

from serve.ipc.messages import Begin, CancelJob, JobAnswer, LoadPages, Message, StorePages
from serve.router.cache_client import CacheClient
from serve.router.ledger import StateLedger
from serve.types import JobId, JobResult

Ended = Callable[[JobId, JobResult, float], None]
"""Called with the result (DONE when all ranks said so) and the seconds since the job was sent."""


@dataclass(slots=True)
class _Running:
    group: str
    num_pages: int
    sent_at: float
    ended: Ended
    is_cancelled: bool = False


class JobBook:
    """Gives job ids out, and holds the device pages of running jobs in the ledger.

    A job keeps its pages by itself: whoever wanted it may be gone long before it ends. Nothing but answers ends it.
    """

    def __init__(
        self, epoch: int, num_ranks: int, ledger: StateLedger, cache: CacheClient, to_workers: Callable[[Message], None]
    ) -> None:
        self.num_ranks = num_ranks
        self._epoch = epoch
        self._ledger = ledger
        self._cache = cache
        self._to_workers = to_workers
        self._counter = 0
        self._running: dict[JobId, _Running] = {}  # in order of sending

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, job: JobId) -> bool:
        return job in self._running

    @property
    def num_pages(self) -> int:
        """Device pages that jobs hold."""
        return sum(running.num_pages for running in self._running.values())

    def new_id(self) -> JobId:
        """An id that no other job of this epoch has."""
        self._counter += 1
        return JobId(self._epoch, self._counter)

    def begin(self, message: LoadPages | StorePages, ended: Ended, now: float) -> bool:
        """Tell the manager, then all ranks. False, and nothing happens, when the manager cannot be told."""
        if not self._cache.tell(Begin(message.job)):
            return False
        self._ledger.begin_job(message.job, message.group, message.pages, self.num_ranks)
        self._running[message.job] = _Running(message.group, len(message.pages), now, ended)
        self._to_workers(message)
        return True

    def cancel(self, job: JobId) -> None:
        """Ask the ranks to stop; the job ends by their answers all the same."""
        running = self._running.get(job)
        if running is not None and not running.is_cancelled:
            running.is_cancelled = True
            self._to_workers(CancelJob(job))

    @property
    def is_giving_back(self) -> bool:
        """Pages come back soon: a cancelled job has not ended."""
        return any(running.is_cancelled for running in self._running.values())

    def answer(self, answer: JobAnswer, now: float) -> None:
        """One rank's answer; repeated and unknown ones change nothing."""
        end = self._ledger.end_job(answer.job, answer.rank, JobResult(answer.result))
        if end is not None:
            running = self._running.pop(end.job)
            running.ended(end.job, end.result, now - running.sent_at)

    def oldest_sent_at(self) -> float | None:
        """When the job that has waited longest was sent."""
        first = next(iter(self._running.values()), None)
        return first.sent_at if first is not None else None
