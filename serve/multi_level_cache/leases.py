"""Leases: what a job of the engine holds of the host tier, from the manager's grant to the last rank's answer.

A LOAD lease pins READY pages, a STORE lease is a claim on FILLING ones. A deadline ends a lease only until its job has
begun; from then on it ends by all ranks' answers or with the engine group, because until then the bytes are in use.
The table knows who holds what; what that means for the pages is the cache manager's to do.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from serve.multi_level_cache.page_state import IllegalMoveError, PageObject
from serve.types import JobId, JobResult

MAX_LAPSED = 4096


class LeaseKind(Enum):
    """What the job does with the slots."""

    LOAD = "load"
    STORE = "store"


class LeasePhase(Enum):
    """PROMOTING: waits for lower tiers. OFFERED: granted, until the deadline. BEGUN: the ranks work on it."""

    PROMOTING = "promoting"
    OFFERED = "offered"
    BEGUN = "begun"
    ENDED = "ended"


PHASE_MOVES: dict[LeasePhase, frozenset[LeasePhase]] = {
    LeasePhase.PROMOTING: frozenset({LeasePhase.OFFERED, LeasePhase.ENDED}),
    LeasePhase.OFFERED: frozenset({LeasePhase.BEGUN, LeasePhase.ENDED}),
    LeasePhase.BEGUN: frozenset({LeasePhase.ENDED}),
    LeasePhase.ENDED: frozenset(),
}


class BeginOutcome(Enum):
    """LATE: the claim had lapsed, and the job may write into its slots now."""

    BEGUN = "begun"
    LATE = "late"
    DUPLICATE = "duplicate"
    UNKNOWN_JOB = "unknown_job"


class AnswerOutcome(Enum):
    """LAST: every rank has answered, the lease has ended. LATE: for a lapsed lease."""

    COUNTED = "counted"
    LAST = "last"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_RANK = "unknown_rank"


@dataclass(eq=False)
class Lease:
    """One job's hold. pages: pinned (LOAD) or FILLING for it (STORE). `phase` moves by `LeaseTable` only."""

    job: JobId
    kind: LeaseKind
    num_ranks: int
    deadline: float
    pages: list[PageObject]
    phase: LeasePhase
    answers: dict[int, JobResult] = field(default_factory=dict)

    def move(self, to: LeasePhase) -> None:
        """The only way to change `phase`."""
        if to not in PHASE_MOVES[self.phase]:
            raise IllegalMoveError(f"lease {self.phase.value} -> {to.value}")
        self.phase = to

    @property
    def is_done(self) -> bool:
        """Every rank has answered DONE."""
        return len(self.answers) == self.num_ranks and all(each is JobResult.DONE for each in self.answers.values())


@dataclass
class LapsedClaim:
    """A claim that ended before its job began. If the job comes after all, it writes into these slots."""

    slots: tuple[int, ...]
    num_ranks: int
    answered: set[int] = field(default_factory=set)
    has_begun: bool = False


class LeaseTable:
    """All living leases by job, and the claims that lapsed lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[JobId, Lease] = {}
        self._lapsed: OrderedDict[JobId, LapsedClaim] = OrderedDict()

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, job: JobId) -> Lease | None:
        """The living lease of a job."""
        return self._leases.get(job)

    def is_known(self, job: JobId) -> bool:
        """The job has, or lately had, a lease: a second Acquire or Claim for it is a duplicate."""
        return job in self._leases or job in self._lapsed

    def open(
        self,
        job: JobId,
        kind: LeaseKind,
        pages: Sequence[PageObject],
        num_ranks: int,
        deadline_s: float,
        phase: LeasePhase,
    ) -> Lease:
        """A new lease; it lapses `deadline_s` from now unless its job begins."""
        if self.is_known(job) or phase not in (LeasePhase.PROMOTING, LeasePhase.OFFERED):
            raise IllegalMoveError(f"lease of {job} opened as {phase.value}")
        lease = self._leases[job] = Lease(job, kind, num_ranks, self._clock() + deadline_s, list(pages), phase)
        return lease

    def begin(self, job: JobId) -> BeginOutcome:
        """The holder has sent the job to the ranks."""
        lease = self._leases.get(job)
        if lease is None:
            lapsed = self._lapsed.get(job)
            if lapsed is None:
                return BeginOutcome.UNKNOWN_JOB
            lapsed.has_begun = True
            return BeginOutcome.LATE
        if lease.phase is not LeasePhase.OFFERED:
            return BeginOutcome.DUPLICATE
        lease.move(LeasePhase.BEGUN)
        return BeginOutcome.BEGUN

    def answer(self, job: JobId, rank: int, result: JobResult) -> AnswerOutcome:
        """Count one rank's terminal answer. An answer that overtakes its Begin begins the job."""
        lease = self._leases.get(job)
        if lease is None:
            return self._answer_lapsed(job, rank)
        if not 0 <= rank < lease.num_ranks:
            return AnswerOutcome.UNKNOWN_RANK
        if lease.phase is LeasePhase.PROMOTING:
            return AnswerOutcome.UNKNOWN_JOB
        if rank in lease.answers:
            return AnswerOutcome.DUPLICATE
        if lease.phase is LeasePhase.OFFERED:
            lease.move(LeasePhase.BEGUN)
        lease.answers[rank] = result
        if len(lease.answers) < lease.num_ranks:
            return AnswerOutcome.COUNTED
        self._end(lease)
        return AnswerOutcome.LAST

    def _answer_lapsed(self, job: JobId, rank: int) -> AnswerOutcome:
        lapsed = self._lapsed.get(job)
        if lapsed is None:
            return AnswerOutcome.UNKNOWN_JOB
        if not 0 <= rank < lapsed.num_ranks:
            return AnswerOutcome.UNKNOWN_RANK
        lapsed.has_begun = True
        lapsed.answered.add(rank)
        return AnswerOutcome.LATE

    def lapsed(self, job: JobId) -> LapsedClaim | None:
        """The lapsed claim of a job, as long as it is remembered."""
        return self._lapsed.get(job)

    def lapse(self, lease: Lease) -> None:
        """End a lease whose job has not begun: released, expired, or its promotion failed."""
        if lease.phase is LeasePhase.BEGUN:
            raise IllegalMoveError(f"lease of {lease.job} has begun and cannot lapse")
        self._end(lease)
        if lease.kind is LeaseKind.STORE:
            slots = tuple(slot for page in lease.pages for slot in page.slots)
            self._lapsed[lease.job] = LapsedClaim(slots, lease.num_ranks)
            self._forget_oldest()

    def expired(self) -> list[Lease]:
        """Leases past their deadline whose job has not begun. Call only when all messages that came were handled."""
        now = self._clock()
        return [lease for lease in self if lease.phase is not LeasePhase.BEGUN and lease.deadline <= now]

    def next_deadline(self) -> float | None:
        """When the next lease may lapse."""
        return min((lease.deadline for lease in self if lease.phase is not LeasePhase.BEGUN), default=None)

    def end_epoch(self, epoch: int) -> tuple[list[Lease], list[JobId]]:
        """The engine groups up to `epoch` are reaped: ends their leases, forgets their lapsed claims. Returns both."""
        leases = [lease for lease in self if lease.job.epoch <= epoch]
        for lease in leases:
            self._end(lease)
        lapsed = [job for job in self._lapsed if job.epoch <= epoch]
        for job in lapsed:
            del self._lapsed[job]
        return leases, lapsed

    def _end(self, lease: Lease) -> None:
        lease.move(LeasePhase.ENDED)
        del self._leases[lease.job]

    def _forget_oldest(self) -> None:
        """Keeps what is remembered bounded; a claim whose job runs now is kept until its ranks have answered."""
        for job in list(self._lapsed)[: max(0, len(self._lapsed) - MAX_LAPSED)]:
            lapsed = self._lapsed[job]
            if not lapsed.has_begun or len(lapsed.answered) == lapsed.num_ranks:
                del self._lapsed[job]
