"""Carries loads out: acquire in the host, reserve on the device, copy, publish; and gives them up on every path."""

from collections.abc import Iterator, KeysView

from serve.ipc.messages import Acquire, AcquireReply, LoadPages, Release
from serve.router.cache_client import CacheClient
from serve.router.cost_model import CostModel
from serve.router.found import ranges_of
from serve.router.jobs import JobBook
from serve.router.ledger import StateLedger
from serve.router.load import Load, LoadPhase
from serve.router.request import Request
from serve.router.tier_statistics import Drop, TransferStatistics
from serve.types import AcquireOutcome, JobId, JobResult, RequestStatus

MAX_ATTEMPTS = 4
_SLOWEST = 4.0  # times the prediction
_SLACK_S = 1.0

_REFUSALS = {
    AcquireOutcome.MISSING: Drop.MISSING,
    AcquireOutcome.BUSY: Drop.BUSY,
    AcquireOutcome.STALE: Drop.STALE,
}


class Loader:
    """Owner of all loads, from `begin` until the request joins the batch, goes back into line, or ends.

    A load that is given up leaves at once; jobs that it began keep their device pages until all ranks have answered.
    """

    def __init__(
        self,
        ledger: StateLedger,
        jobs: JobBook,
        cache: CacheClient,
        costs: CostModel,
        page_bytes: dict[str, int],
        num_layers: int,
        statistics: TransferStatistics,
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._cache = cache
        self._costs = costs
        self._page_bytes = page_bytes
        self._num_layers = num_layers
        self._statistics = statistics
        self._loads: dict[Request, Load] = {}
        self._by_job: dict[JobId, Load] = {}
        self._orphans: dict[JobId, tuple[str, int]] = {}  # begun by loads that were given up: group, pages
        self._stuck: set[JobId] = set()  # given up as too slow, and still running
        self._coming: dict[bytes, Load] = {}
        self._last_end = 0.0

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def get(self, request: Request) -> Load | None:
        """The request's load."""
        return self._loads.get(request)

    @property
    def coming(self) -> KeysView[bytes]:
        """Names of the pages that loads are bringing."""
        return self._coming.keys()

    @property
    def bytes_coming(self) -> int:
        """Bytes that loads are still to bring."""
        return sum(load.num_bytes for load in self._loads.values() if load.phase is not LoadPhase.LOADED)

    @property
    def is_stuck(self) -> bool:
        """A copy takes far longer than predicted: whatever is asked for now comes behind it."""
        return bool(self._stuck)

    def num_held(self, group: str) -> int:
        """Pages that loads have reserved, given-up ones included while their jobs run."""
        held = sum(len(load.fresh[group]) for load in self._loads.values())
        return held + sum(count for of, count in self._orphans.values() if of == group)

    # --- its way ---

    def begin(self, load: Load) -> None:
        """Ask for the pages of a new load whose holding is reserved; given up at once when nobody can be asked."""
        request = load.request
        self._loads[request] = load
        request.advance(RequestStatus.LOADING)
        self._coming.update(dict.fromkeys(load.names, load))
        wait_s = load.deadline - load.asked_at
        for group, places in load.fresh.items():
            if not places or not self._page_bytes[group]:
                continue
            job, key = self._jobs.new_id(), request.key
            ranges, lease_s = ranges_of(group, places), 2 * wait_s + _SLACK_S
            message = Acquire(job, key.slot, key.generation, ranges, self._jobs.num_ranks, lease_s)
            if not self._cache.request(message, load.asked_at):
                request.found = None
                self.give_up(request, Drop.AWAY)
                return
            load.jobs[job] = group
            load.waiting.add(job)
            self._by_job[job] = load
        if not load.jobs:  # what the device lacks has no bytes
            load.begun_at = load.asked_at
            self._loaded(load, load.asked_at)

    def take_reply(self, reply: AcquireReply, now: float) -> None:
        """The manager's answer. One that nobody waits for any more is given back."""
        self._cache.heard()
        load = self._by_job.get(reply.job)
        if load is None or load.phase is not LoadPhase.ACQUIRING:
            if reply.outcome is AcquireOutcome.GRANTED and reply.job not in self._jobs:
                self._cache.tell(Release(reply.job))
            return
        if reply.outcome is not AcquireOutcome.GRANTED:
            self._refused(load, reply)
            return
        load.grants[reply.job] = reply
        load.num_promoted = max(load.num_promoted, self._num_promoted(load, reply))
        load.waiting.discard(reply.job)
        if reply.promoted:
            num_bytes = reply.promoted * self._page_bytes[load.jobs[reply.job]]
            self._costs.observe_promotion(num_bytes, now - load.asked_at, now)
        if not load.waiting:
            self._copy(load, now)

    def _num_promoted(self, load: Load, reply: AcquireReply) -> int:
        """Pages of the prefix that a group's objects from disk stand for."""
        is_full = self._ledger.groups[load.jobs[reply.job]].spec.is_full
        return reply.promoted if is_full or not reply.promoted else load.num_loaded

    def _refused(self, load: Load, reply: AcquireReply) -> None:
        request = load.request
        request.load_attempts += 1
        num_pages = max(map(len, load.fresh.values()))
        self.give_up(request, _REFUSALS[reply.outcome])
        if request.found is not None and reply.outcome is AcquireOutcome.MISSING and reply.missing:
            request.found.lose(reply.missing)
        elif reply.outcome is AcquireOutcome.BUSY and num_pages > 1:
            request.load_cap = num_pages // 2
        else:
            request.found = None
        if request.load_attempts >= MAX_ATTEMPTS:
            request.found = None

    def _copy(self, load: Load, now: float) -> None:
        load.phase, load.begun_at = LoadPhase.COPYING, now
        load.deadline = now + _SLACK_S + _SLOWEST * load.predicted_s
        for job, group in load.jobs.items():
            if not self._jobs.begin(self._message(load, job, group), self._job_ended, now):
                load.request.found = None
                self.give_up(load.request, Drop.AWAY)
                return
            load.waiting.add(job)
            load.begun.add(job)
            self._statistics.num_started += 1

    def _message(self, load: Load, job: JobId, group: str) -> LoadPages:
        holding, grant = load.request.holding, load.grants[job]
        assert holding is not None
        pages = [holding.page_at(group, place) for place in load.fresh[group]]
        slots = [slot for slots in grant.slots for slot in slots]
        generations = [generation for generations in grant.generations for generation in generations]
        return LoadPages(job, group, pages, slots, generations, 0, self._num_layers)

    def _job_ended(self, job: JobId, result: JobResult, seconds: float) -> None:
        orphan, load = self._orphans.pop(job, None), self._by_job.get(job)
        self._stuck.discard(job)
        group, num_pages = orphan if orphan is not None else ("", 0)
        if load is not None:
            group = load.jobs[job]
            num_pages = len(load.fresh[group])
        self._statistics.ended(result, num_pages, num_pages * self._page_bytes.get(group, 0), seconds)
        if load is None:
            return
        load.waiting.discard(job)
        if result is not JobResult.DONE:
            load.request.found = None
            self.give_up(load.request)
        elif not load.waiting:
            self._loaded(load, load.begun_at + seconds)

    def _loaded(self, load: Load, now: float) -> None:
        self._costs.observe_load(load.num_bytes, now - max(load.begun_at, self._last_end), now)
        self._last_end = now
        load.phase = LoadPhase.LOADED
        self._forget(load)
        holding, names = load.request.holding, load.request.names
        assert holding is not None
        for group, places in load.fresh.items():
            for place in places:
                self._ledger.publish(group, holding.page_at(group, place), names[place], load.request.root)

    # --- its end ---

    def take(self, request: Request) -> Load | None:
        """The request joins the batch with what was loaded for it, which it holds from now on."""
        return self._loads.pop(request, None)

    def give_up(
        self, request: Request, reason: Drop | None = None, to: RequestStatus | None = RequestStatus.QUEUED
    ) -> None:
        """End the request's load, wherever it stands, if it has one. to: its status then; None: it has ended."""
        load = self._loads.pop(request, None)
        if load is None:
            return
        if reason is not None:
            self._statistics.num_dropped[reason] += 1
        for job, group in load.jobs.items():
            if job in self._jobs:
                self._jobs.cancel(job)
                self._orphans[job] = group, len(load.fresh[group])
                if reason is Drop.SLOW:
                    self._stuck.add(job)
            elif job not in load.begun:
                self._cache.tell(Release(job))
        self._forget(load)
        if request.holding is not None:
            self._ledger.release(request.holding)
            request.holding = None
        if to is not None:
            request.advance(to)

    def _forget(self, load: Load) -> None:
        for job in load.jobs:
            self._by_job.pop(job, None)
        for name in load.names:
            if self._coming.get(name) is load:
                del self._coming[name]

    def give_way(self, behind: tuple[int, int] | None) -> bool:
        """Give up the youngest load (of requests behind that place in line); False when there is none."""
        loads = [load for load in self._loads.values() if behind is None or load.request.sort_key > behind]
        if not loads:
            return False
        youngest = max(loads, key=lambda load: load.request.sort_key)
        youngest.request.found = None
        self.give_up(youngest.request, Drop.PREEMPTED, RequestStatus.PREEMPTED)
        return True

    def lease_lost(self, job: JobId) -> bool:
        """The manager has taken the pages back: what comes cannot be trusted. False when it is no load's job."""
        load = self._by_job.get(job)
        if load is None:
            return job in self._orphans
        load.request.found = None
        self.give_up(load.request, Drop.LOST)
        return True

    def manager_down(self) -> None:
        """Nobody will answer what was asked. Copies that have begun go on: the arena is still there."""
        for load in [load for load in self._loads.values() if load.phase is LoadPhase.ACQUIRING]:
            load.request.found = None
            self.give_up(load.request, Drop.LOST)

    def give_up_all(self, reason: Drop, root: bytes | None = None) -> None:
        """End all loads, or those under a root."""
        for request in [request for request in self._loads if root is None or request.root == root]:
            request.found = None
            self.give_up(request, reason)

    def check_deadlines(self, now: float) -> None:
        """Nobody waits longer than the deadline, whatever the jobs do."""
        for load in [load for load in self._loads.values() if load.phase is not LoadPhase.LOADED]:
            if load.deadline <= now:
                is_late = load.phase is LoadPhase.ACQUIRING
                if is_late:
                    self._cache.missed()
                load.request.found = None
                self.give_up(load.request, Drop.LATE if is_late else Drop.SLOW)

    def next_deadline(self) -> float | None:
        """When `check_deadlines` has something to do."""
        loads = (load for load in self._loads.values() if load.phase is not LoadPhase.LOADED)
        return min((load.deadline for load in loads), default=None)
