"""After the manager's restart: which slots do jobs of the time before still touch?

Nothing is allocated until every living worker has told; those slots stay unusable until the jobs have ended there.
"""

from serve.ipc.messages import SlotsInUse
from serve.multi_level_cache.slot_pool import SlotPool
from serve.types import JobId


class Resync:
    """Collects the workers' answers. A manager that starts first of all need not wait."""

    def __init__(self, pool: SlotPool, nonce: int, is_needed: bool) -> None:
        self._pool = pool
        self.nonce = nonce
        self._is_needed = is_needed
        self._epoch: int | None = None
        self._waiting: set[int] = set()
        self._blocks: set[tuple[JobId, int]] = set()  # jobs of before, by rank

    @property
    def is_complete(self) -> bool:
        """May slots be allocated?"""
        return not self._is_needed

    def engine_up(self, epoch: int, num_ranks: int) -> list[int]:
        """An engine group lives; returns the ranks to ask."""
        if not self._is_needed or self._epoch is not None:
            return []
        self._epoch = epoch
        self._waiting = set(range(num_ranks))
        return sorted(self._waiting)

    def engine_down(self, epoch: int) -> None:
        """The engine groups up to `epoch` are reaped: they touch nothing any more."""
        if self._epoch is None or self._epoch <= epoch:
            self._is_needed = False
            self._waiting = set()
        for job, rank in [block for block in self._blocks if block[0].epoch <= epoch]:
            self.job_ended(job, rank)

    def slots_in_use(self, answer: SlotsInUse) -> bool:
        """Count a worker's answer; False when it was not asked for."""
        if answer.nonce != self.nonce or answer.rank not in self._waiting:
            return False
        self._waiting.discard(answer.rank)
        slots = [slot for slot in answer.slots if 0 <= slot < self._pool.num_slots]
        for job in answer.jobs:
            self._blocks.add((job, answer.rank))
            self._pool.block(slots, (job, answer.rank))
        self._is_needed = bool(self._waiting)
        return True

    def job_ended(self, job: JobId, rank: int) -> bool:
        """A job of before has ended on a rank; False for jobs that are none of these."""
        if (job, rank) not in self._blocks:
            return False
        self._blocks.discard((job, rank))
        self._pool.unblock((job, rank))
        return True
