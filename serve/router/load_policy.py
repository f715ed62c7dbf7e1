"""Whether, when and how much to load for those who wait: never what recomputing would have done earlier."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import islice

from serve.router.cost_model import CostModel
from serve.router.ledger import StateLedger
from serve.router.load import Load, LoadPhase
from serve.router.load_plan import LoadPlan, PlanMaker
from serve.router.loader import Loader
from serve.router.page_needs import PageNeeds
from serve.router.prefix_index import first_needed
from serve.router.queue import WaitingQueue
from serve.router.request import Request
from serve.router.tier_statistics import Drop, TransferStatistics
from serve.types import RequestStatus

MAX_EXAMINED = 16
_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 5.0
# How much longer than predicted the disk may take, and the share of recomputing that finding out may cost in any case.
_PATIENCE, _RISK = 3.0, 0.125


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else is going on.

    backlog: prompt tokens that rows have still to compute. growth: by group, pages that running requests are expected
    to ask for. computing: names of the pages that rows compute next.
    """

    now: float
    backlog: int
    growth: Mapping[str, int]
    computing: Set[bytes]


@dataclass(frozen=True, slots=True)
class _Forecast:
    """Seconds from now. loaded_s: until the pages are there; computed_s: until recomputing would have made them."""

    loaded_s: float
    computed_s: float

    @property
    def slack_s(self) -> float:
        return self.computed_s - self.loaded_s


# Seconds that a load may take beyond its forecast where loads are wanted whether they pay or not.
_ALWAYS_SLACK_S = 1.0


class LoadPolicy:
    """Starts loads in the order of the queue, as long as pages and the share for loading allow.

    loads_always: take what is there although recomputing is predicted to be done earlier.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        ledger: StateLedger,
        needs: PageNeeds,
        costs: CostModel,
        loader: Loader,
        plans: PlanMaker,
        fraction: float,
        statistics: TransferStatistics,
        loads_always: bool = False,
    ) -> None:
        self._loads_always = loads_always
        self.wait_deadline: float | None = None
        self._queue = queue
        self._ledger = ledger
        self._needs = needs
        self._costs = costs
        self._loader = loader
        self._plans = plans
        self._limits = {
            name: max(1, group.spec.window_pages, int(group.num_pages * fraction))
            for name, group in ledger.groups.items()
        }
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

    def reserved(self, before: tuple[int, int]) -> Mapping[str, int]:
        """Pages by group that older loading requests will ask for when they join."""
        total: Counter[str] = Counter()
        for load in self._loader:
            if load.phase is not LoadPhase.LOADED and load.request.sort_key < before:
                total.update(self._needs.joining(load.request, load.plan.num_pages))
                total.update(self._needs.growth(load.request, load.plan.num_pages))
        return total

    def _examine(self, request: Request, is_blocked: bool, around: Surroundings) -> bool:
        """Start its load or leave it; False when it has to wait for room."""
        plan = self._plan(request)
        if plan is None or not self._is_alone(request, plan, around):
            return True
        forecast = self._forecast(request, plan, around)
        if forecast.slack_s <= 0:
            self._refuse(request)
            return True
        most = {group: limit - self._loader.num_held(group) for group, limit in self._limits.items()}
        assert request.found is not None
        fitting = self._plans.cut(plan, request.names, request.found, most)
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
        return self._plans.cut(plan, request.names, request.found, dict.fromkeys(plan.missing, request.load_cap))

    def _is_alone(self, request: Request, plan: LoadPlan, around: Surroundings) -> bool:
        """Nobody else brings or computes the next page, or the last: otherwise it is held for that one."""
        names = {request.names[plan.first_missing], request.names[plan.num_pages - 1]}
        return names.isdisjoint(self._loader.coming) and names.isdisjoint(around.computing)

    def _forecast(self, request: Request, plan: LoadPlan, around: Surroundings) -> _Forecast:
        """The suffix has to be computed either way, behind what the batch computes already."""
        assert request.found is not None
        speed = self._costs.prefill_tokens_per_s(around.now)
        ahead = self._loader.bytes_coming + self._bytes_ahead
        disk = self._plans.disk_bytes(plan, request.found)
        load_s = self._costs.load_s(ahead + self._plans.bytes_of(plan), disk, around.now)
        backlog_s, gained_s = around.backlog / speed, plan.num_gained * self._ledger.page_size / speed
        loaded_s, computed_s = max(backlog_s, load_s), backlog_s + gained_s
        if self._loads_always:
            computed_s = max(computed_s, loaded_s + _ALWAYS_SLACK_S)
        return _Forecast(loaded_s, computed_s)

    def _refuse(self, request: Request) -> None:
        if not request.is_load_refused:
            request.is_load_refused = True
            self._statistics.num_dropped[Drop.NOT_PAYING] += 1

    def _wait(self, request: Request, plan: LoadPlan, forecast: _Forecast, now: float) -> None:
        self._bytes_ahead += self._plans.bytes_of(plan)
        if not request.load_wait_until:
            request.load_wait_until = now + min(forecast.slack_s, _MAX_WAIT_S)

    def _has_room(self, request: Request, plan: LoadPlan, growth: Mapping[str, int]) -> bool:
        """As for any request that enters: room for all of it, beside what those before it are expected to need."""
        reserved, wanted = self.reserved(request.sort_key), self._needs.in_all(request, plan.num_pages)
        for name, group in self._ledger.groups.items():
            needed = request.names[first_needed(group.spec, plan.num_pages) : plan.num_pages]
            present = [page for page in map(group.index.page, needed) if page is not None]
            idle = sum(group.refs(page) == 0 for page in present)
            taken = growth.get(name, 0) + reserved.get(name, 0)
            if wanted[name] - len(present) + idle + taken > group.room:
                return False
        return True

    def _begin(self, request: Request, plan: LoadPlan, forecast: _Forecast, now: float) -> None:
        assembled = self._ledger.assemble(request.names[: plan.num_pages])
        assert assembled is not None, "a load is begun without room"
        request.holding, fresh = assembled
        wait_s = min(max(self._patience_s(request, plan, forecast), _MIN_WAIT_S), _MAX_WAIT_S)
        num_bytes = self._plans.bytes_of(plan)
        num_loaded = self._num_loaded(plan, fresh)
        self._loader.begin(Load(request, plan, fresh, num_loaded, num_bytes, forecast.loaded_s, now, now + wait_s))

    def _num_loaded(self, plan: LoadPlan, fresh: Mapping[str, list[int]]) -> int:
        """Pages that the prefix has thanks to a load: those of FULL groups one by one.

        An object of another group makes the whole prefix usable, beyond what the device has alone.
        """
        groups = self._ledger.groups
        num_full = len({place for name, places in fresh.items() if groups[name].spec.is_full for place in places})
        has_other = any(places for name, places in fresh.items() if not groups[name].spec.is_full)
        return max(num_full, plan.num_gained if has_other else 0)

    def _patience_s(self, request: Request, plan: LoadPlan, forecast: _Forecast) -> float:
        """How long to wait for the grant. A disk far slower than predicted must not cost as much as recomputing."""
        assert request.found is not None
        if self._loads_always or not self._plans.disk_bytes(plan, request.found):
            return forecast.computed_s
        return min(forecast.computed_s, max(_PATIENCE * forecast.loaded_s, _RISK * forecast.computed_s))
