"""Whether, when and how much to load for those who wait: never what recomputing would have done earlier."""

from collections.abc import Set
from dataclasses import dataclass
from itertools import islice

from serve.router.admission import Admission
from serve.router.cost_model import CostModel
from serve.router.ledger import StateLedger
from serve.router.load import Load, LoadPhase
from serve.router.load_plan import LoadPlan, PlanMaker
from serve.router.loader import Loader
from serve.router.queue import WaitingQueue
from serve.router.request import Request
from serve.router.tier_statistics import Drop, TransferStatistics
from serve.types import RequestStatus

MAX_EXAMINED = 16
_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 5.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else is going on.

    backlog: prompt tokens that rows have still to compute. growth: pages that running requests are expected to ask for.
    computing: names of the pages that rows compute next.
    """

    now: float
    backlog: int
    growth: int
    computing: Set[bytes]


@dataclass(frozen=True, slots=True)
class _Forecast:
    """Seconds from now. loaded_s: until the pages are there; computed_s: until recomputing would have made them."""

    loaded_s: float
    computed_s: float

    @property
    def slack_s(self) -> float:
        return self.computed_s - self.loaded_s


class LoadPolicy:
    """Starts loads in the order of the queue, as long as pages and the share for loading allow."""

    def __init__(
        self,
        queue: WaitingQueue,
        ledger: StateLedger,
        admission: Admission,
        costs: CostModel,
        loader: Loader,
        plans: PlanMaker,
        fraction: float,
        statistics: TransferStatistics,
    ) -> None:
        self.wait_deadline: float | None = None
        self._queue = queue
        self._ledger = ledger
        self._admission = admission
        self._costs = costs
        self._loader = loader
        self._plans = plans
        self._limits = {name: max(1, int(group.num_pages * fraction)) for name, group in ledger.groups.items()}
        self._statistics = statistics
        self._bytes_ahead = 0  # of loads that wait for others, in this round

    def start(self, around: Surroundings) -> None:
        """Start what pays now. Behind the first one that has to wait for room, the others wait too."""
        self._bytes_ahead, is_blocked = 0, False
        self.wait_deadline = None
        for request in list(islice(self._queue, MAX_EXAMINED)):
            if request.found is None or request.status is RequestStatus.LOADING:
                continue
            if self._loader.is_stuck:
                request.load_wait_until = 0.0  # nobody knows when the load path will be free: it recomputes
                continue
            if not (is_blocked and self.is_waiting(request, around.now)):
                is_blocked |= not self._examine(request, is_blocked, around)
            if self.is_waiting(request, around.now):
                until = request.load_wait_until
                self.wait_deadline = until if self.wait_deadline is None else min(until, self.wait_deadline)

    @staticmethod
    def is_waiting(request: Request, now: float) -> bool:
        """It lets others have the load path first, which is still better than to recompute."""
        return request.found is not None and request.load_wait_until > now

    def reserved(self, before: tuple[int, int]) -> int:
        """Pages that older loading requests will ask for when they join."""
        return sum(
            self._pages_missing(load.request, load.plan.num_pages)
            for load in self._loader
            if load.phase is not LoadPhase.LOADED and load.request.sort_key < before
        )

    def _examine(self, request: Request, is_blocked: bool, around: Surroundings) -> bool:
        """Start its load or leave it; False when it has to wait for room."""
        plan = self._plan(request)
        if plan is None or not self._is_alone(request, plan, around):
            return True
        forecast = self._forecast(request, plan, around)
        if forecast.slack_s <= 0:
            self._refuse(request)
            return True
        fitting = plan.cut({group: limit - self._loader.num_held(group) for group, limit in self._limits.items()})
        is_shorter = fitting is None or fitting.num_pages < plan.num_pages
        if is_blocked or (is_shorter and any(map(self._loader.num_held, self._limits))):
            self._wait(request, plan, forecast, around.now)
            return False
        if fitting is None or not self._has_room(request, fitting, around.growth):
            return False
        if is_shorter:
            forecast = self._forecast(request, fitting, around)
            if forecast.slack_s <= 0:
                self._refuse(request)
                return True
        self._begin(request, fitting, forecast, around.now)
        return True

    def _plan(self, request: Request) -> LoadPlan | None:
        assert request.found is not None
        plan = self._plans.plan(request.names, request.num_tokens, request.found)
        if plan is None or request.load_cap is None:
            return plan
        return plan.cut(dict.fromkeys(plan.missing, request.load_cap))

    def _is_alone(self, request: Request, plan: LoadPlan, around: Surroundings) -> bool:
        """Nobody else brings or computes the next page: otherwise it is held for that one."""
        name = request.names[plan.first_missing]
        return name not in self._loader.coming and name not in around.computing

    def _forecast(self, request: Request, plan: LoadPlan, around: Surroundings) -> _Forecast:
        """The suffix has to be computed either way, behind what the batch computes already."""
        assert request.found is not None
        speed = self._costs.prefill_tokens_per_s(around.now)
        ahead = self._loader.bytes_coming + self._bytes_ahead
        disk = self._plans.disk_bytes(plan, request.found)
        load_s = self._costs.load_s(ahead + self._plans.bytes_of(plan), disk, around.now)
        backlog_s, gained_s = around.backlog / speed, plan.num_gained * self._ledger.page_size / speed
        return _Forecast(max(backlog_s, load_s), backlog_s + gained_s)

    def _refuse(self, request: Request) -> None:
        if not request.is_load_refused:
            request.is_load_refused = True
            self._statistics.num_dropped[Drop.NOT_PAYING] += 1

    def _wait(self, request: Request, plan: LoadPlan, forecast: _Forecast, now: float) -> None:
        self._bytes_ahead += self._plans.bytes_of(plan)
        if not request.load_wait_until:
            request.load_wait_until = now + min(forecast.slack_s, _MAX_WAIT_S)

    def _pages_missing(self, request: Request, num_pages: int) -> int:
        """Pages that it needs beyond its first `num_pages`, now and as far as expected."""
        known = self._admission.pages_for(request.num_tokens)
        return known - num_pages + self._admission.expected_growth(request)

    def _has_room(self, request: Request, plan: LoadPlan, growth: int) -> bool:
        """As for any request that enters: room for all of it, beside what those before it are expected to need."""
        taken = growth + self.reserved(request.sort_key)
        for name, group in self._ledger.groups.items():
            present = plan.num_pages - len(plan.missing[name])
            pages = (group.index.page(each) for each in request.names[: plan.num_pages])
            idle = sum(page is not None and group.refs(page) == 0 for page in pages)
            if self._pages_missing(request, present) + taken + idle > group.room:
                return False
        return True

    def _begin(self, request: Request, plan: LoadPlan, forecast: _Forecast, now: float) -> None:
        assembled = self._ledger.assemble(request.names[: plan.num_pages])
        assert assembled is not None, "a load is begun without room"
        request.holding, fresh = assembled
        wait_s = min(max(forecast.computed_s, _MIN_WAIT_S), _MAX_WAIT_S)
        num_bytes = self._plans.bytes_of(plan)
        self._loader.begin(Load(request, plan, fresh, num_bytes, forecast.loaded_s, now, now + wait_s))
