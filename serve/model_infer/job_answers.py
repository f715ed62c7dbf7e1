"""Answers to page jobs in a worker that has no host tier.

`serve.multi_level_cache` gives pages a host form; a worker that can copy them replaces this object with its staging
engine. Until then every job is refused, so that the router recomputes and the cache manager frees its slots.
"""

from serve.ipc.channel import Outbox
from serve.ipc.messages import CancelJob, JobAnswer, LoadPages, Resync, SlotsInUse, StorePages
from serve.types import JobId, JobResult


class RefusedJobs:
    """Answers each job once, to the router and to the cache manager, as docs/cache_protocol.md wants it."""

    def __init__(self, rank: int, router: Outbox, cache: Outbox) -> None:
        self._rank = rank
        self._router = router
        self._cache = cache

    def submit(self, message: LoadPages | StorePages) -> None:
        """A job: refused at once."""
        self._answer(message.job)

    def cancel(self, message: CancelJob) -> None:
        """The job has had its one answer already."""

    def resync(self, message: Resync) -> None:
        """No host slot is ever touched here."""
        self._cache.send(SlotsInUse(message.nonce, self._rank, [], []))

    def _answer(self, job: JobId) -> None:
        answer = JobAnswer(job, self._rank, JobResult.FAILED, "no host tier")
        self._router.send(answer)
        self._cache.send(answer)
