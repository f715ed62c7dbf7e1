"""The tiers below the device, as the router sees them: lookups, loads, write-back and flush, behind one door."""

from collections.abc import Callable, Mapping, Set

from serve.ipc.messages import AcquireReply, ClaimReply, JobAnswer, LeaseLost, Message, ProbeReply
from serve.router.batch import Batch
from serve.router.cache_client import CacheClient
from serve.router.cost_model import CostModel
from serve.router.found import Found
from serve.router.jobs import JobBook
from serve.router.ledger import StateLedger
from serve.router.load import Load, LoadPhase
from serve.router.load_plan import PlanMaker
from serve.router.load_policy import LoadPolicy, Surroundings
from serve.router.loader import Loader
from serve.router.page_needs import PageNeeds
from serve.router.queue import WaitingQueue
from serve.router.request import Request
from serve.router.settings import EngineFacts, RouterSettings
from serve.router.step_plan import Pipeline
from serve.router.tier_statistics import Drop, TierStatistics
from serve.router.write_back import WriteBack
from serve.types import RequestStatus


class Tiers:
    """Wires the parts together and gives each message to the part that owns it."""

    def __init__(
        self,
        settings: RouterSettings,
        facts: EngineFacts,
        queue: WaitingQueue,
        batch: Batch,
        ledger: StateLedger,
        needs: PageNeeds,
        costs: CostModel,
        pipeline: Pipeline,
        cache: CacheClient,
        to_workers: Callable[[Message], None],
        clock: Callable[[], float],
        statistics: TierStatistics,
    ) -> None:
        self.jobs = JobBook(settings.epoch, settings.num_ranks, ledger, cache, to_workers)
        self._costs = costs
        self.loader = Loader(ledger, self.jobs, cache, costs, facts.page_bytes, settings.num_layers, statistics.loads)
        self.write_back = WriteBack(
            ledger, self.jobs, cache, pipeline, facts.page_bytes, settings.stores_output, statistics.stores
        )
        self._plans = PlanMaker(ledger, facts.page_bytes)
        self._policy = LoadPolicy(
            queue,
            ledger,
            needs,
            costs,
            self.loader,
            self._plans,
            settings.max_loading_fraction,
            statistics.loads,
            settings.loads_always,
        )
        self._batch = batch
        self._cache = cache
        self._clock = clock
        self._is_sync = settings.cache_is_sync
        self._statistics = statistics

    # --- for the planner ---

    @property
    def coming(self) -> Set[bytes]:
        """Names of pages that are being loaded."""
        return self.loader.coming

    @property
    def must_wait(self) -> bool:
        """Without overlap a step waits for the jobs that have begun."""
        return self._is_sync and len(self.jobs) > 0

    def is_candidate(self, request: Request, now: float) -> bool:
        """May the waiting request be admitted? Not while its pages come, or while it waits for the load path."""
        if request.status is RequestStatus.LOADING:
            return self.loaded(request) is not None
        return not self._policy.is_waiting(request, now)

    def loaded(self, request: Request) -> Load | None:
        """The request's load, once its pages are there."""
        load = self.loader.get(request)
        return load if load is not None and load.phase is LoadPhase.LOADED else None

    def reserved(self, before: Request) -> Mapping[str, int]:
        """Pages by group that loading requests before this one will ask for."""
        return self._policy.reserved(before.sort_key) if len(self.loader) else {}

    def num_known(self, request: Request) -> int:
        """Pages of its prefix that the FULL groups have on any tier, whatever a hit needs beside them."""
        assert request.found is not None
        return self._plans.num_known(request.names, request.num_tokens, request.found)

    def start_loads(self, now: float, growth: Mapping[str, int], computing: Set[bytes]) -> None:
        """Start what pays."""
        if self._cache.has_manager:
            backlog = sum(row.num_known - row.num_scheduled for row in self._batch.prefilling.values())
            self._policy.start(Surroundings(now, backlog, growth, computing))

    def joined(self, request: Request, load: Load | None, now: float) -> None:
        """The request has joined the batch; `num_scheduled` tokens need not be computed."""
        if self._cache.has_manager:
            fresh = load.fresh if load is not None else {}
            self.write_back.admitted(request, request.num_published, fresh, now)

    def computed(self, chunks: list[tuple[Request, int]], now: float) -> None:
        """A plan has ended that computed known tokens of these up to these numbers."""
        if self._cache.has_manager:
            for request, num_tokens in chunks:
                if not request.is_ended:
                    self.write_back.computed(request, num_tokens, now)

    # --- what ends ---

    def ended(self, request: Request, is_trusted: bool, now: float) -> None:
        """A request is over; its pages are still held."""
        self.loader.give_up(request, Drop.ENDED, to=None)
        if not self._cache.has_manager:
            return
        if is_trusted:
            self.write_back.ended(request, now)
        else:
            self.write_back.distrust(frozenset(request.names))

    def checkpointed(self, request: Request, place: int, now: float) -> None:
        """The last state of a request that is over has become the checkpoint of that place."""
        if self._cache.has_manager:
            self.write_back.checkpointed(request, place, now)

    # --- messages ---

    def handlers(self) -> dict[type[Message], Callable[..., None]]:
        """By type of message."""
        return {
            ProbeReply: self._take_probe_reply,
            AcquireReply: lambda reply: self.loader.take_reply(reply, self._clock()),
            ClaimReply: lambda reply: self.write_back.take_reply(reply, self._clock()),
            LeaseLost: self._take_lease_lost,
            JobAnswer: lambda answer: self.jobs.answer(answer, self._clock()),
        }

    def _take_probe_reply(self, reply: ProbeReply) -> None:
        self._costs.tell_promotion(reply.disk_bytes_per_s)
        request = self._cache.take(reply)
        if request is not None:
            found = Found.of(reply)
            request.found = None if found.is_empty else found
            request.advance(RequestStatus.QUEUED)

    def _take_lease_lost(self, message: LeaseLost) -> None:
        if not self.loader.lease_lost(message.job):
            self.write_back.lease_lost(message.job)

    def manager_down(self) -> None:
        """Every question is a miss, and what was stored has gone."""
        self.loader.manager_down()
        self.write_back.drop_claims(Drop.LOST)

    def flush(self, root: bytes | None = None) -> None:
        """Give up all that would bring back, or store, a page of before (under a root)."""
        self._statistics.num_flushes += 1
        self.loader.give_up_all(Drop.FLUSHED, root)
        self.write_back.drop_claims(Drop.FLUSHED, root)

    # --- time ---

    def check_deadlines(self, now: float) -> None:
        """End waiting that has lasted too long."""
        self.loader.check_deadlines(now)
        self.write_back.check_deadlines(now)
        self.write_back.resume(now)

    def next_deadline(self) -> float | None:
        """When something of this has to be looked at."""
        deadlines = (self.loader.next_deadline(), self.write_back.next_deadline(), self._policy.wait_deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)
