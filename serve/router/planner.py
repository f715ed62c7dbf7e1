"""From the state of queue, batch and ledger to the next plan: makes the scheduler's view, carries its schedule out."""

from collections.abc import Callable

from serve.ipc.messages import StepPlan
from serve.router.admission import Admission
from serve.router.batch import Batch, RowPhase
from serve.router.checkpoints import Checkpointer
from serve.router.cost_model import CostModel
from serve.router.ledger import StateLedger
from serve.router.load import Load
from serve.router.page_needs import PageNeeds
from serve.router.queue import WaitingQueue
from serve.router.request import Request
from serve.router.row_pages import RowPages
from serve.router.scheduler import Blocked, Schedule, Scheduler, SchedulerView
from serve.router.statistics import RouterStatistics
from serve.router.step_plan import Pipeline, PlanBuilder, PlanRecord
from serve.router.tiers import Tiers
from serve.router.view import ViewMaker
from serve.types import CacheTier, RequestStatus


class Planner:
    """Makes plans, and is the only one who gives pages and rows to requests.

    Decoding rows advance by one counter each and one comparison (`Request.milestone`); everything else is done only
    when something happens to a row.
    """

    def __init__(
        self,
        epoch: int,
        scheduler: Scheduler,
        queue: WaitingQueue,
        batch: Batch,
        ledger: StateLedger,
        admission: Admission,
        needs: PageNeeds,
        checkpoints: Checkpointer,
        costs: CostModel,
        pipeline: Pipeline,
        tiers: Tiers,
        statistics: RouterStatistics,
    ) -> None:
        self.is_admitting = True
        self.hold_deadline: float | None = None
        self.departing: list[Request] = []  # out of the batch, in plans that have not ended
        self._epoch = epoch
        self._scheduler = scheduler
        self._queue = queue
        self._batch = batch
        self._ledger = ledger
        self._admission = admission
        self._costs = costs
        self._pipeline = pipeline
        self._tiers = tiers
        self._statistics = statistics
        self._blocked: Blocked | None = None
        self._checkpoints = checkpoints
        self._pages = RowPages(ledger, needs)
        self._views = ViewMaker(scheduler.limits, queue, batch, ledger, needs, checkpoints, costs, pipeline, tiers)

    def next_plan(self, send: Callable[[StepPlan], None], now: float) -> bool:
        """Send the next plan, if there is anything to run; True when another call may do more."""
        if self._tiers.must_wait:
            return False
        if len(self._tiers.loader):
            self._take_pages_of_loads()
        pages_coming = bool(self.departing) or self._tiers.jobs.is_giving_back
        growth = self._pages.growth.total
        view = self._views.view(now, self.is_admitting, growth, pages_coming, self._blocked)
        schedule = self._scheduler.schedule(view)
        self._blocked = schedule.blocked
        plan = self._carry_out(schedule, now)
        if plan is None:
            return bool(schedule.preemptions) or self._unblock(view, schedule)
        send(plan)
        return True

    def start_loads(self, now: float) -> None:
        """Bring pages of waiting requests in, where that pays."""
        if self.is_admitting and len(self._queue):
            self._tiers.start_loads(now, self._pages.growth.total, self._views.computing())

    def _take_pages_of_loads(self) -> None:
        """Rows that run come before requests that load."""
        while self._views.lacks_pages(self._ledger.room()) and self._tiers.loader.give_way(behind=None):
            pass

    def _unblock(self, view: SchedulerView, schedule: Schedule) -> bool:
        """Nothing runs, and the first in line lacks pages: loads behind it must not keep them. True when one did."""
        if schedule.blocked is not Blocked.PAGES or len(self._batch) or self.departing:
            return False
        first = next(each.slot for each in view.candidates if each.slot not in schedule.held)
        request = next(request for request in self._queue if request.key.slot == first)
        return self._tiers.loader.give_way(behind=request.sort_key)

    # --- carrying a schedule out ---

    def _carry_out(self, schedule: Schedule, now: float) -> StepPlan | None:
        plan = PlanBuilder(self._epoch, self._pipeline.next_step)
        joining = self._acquire_all(schedule)
        for row in schedule.preemptions:
            self._preempt(self._batch.request(row))
        for row, num_pages in schedule.grants:
            self._grant(plan, row, num_pages)
        for request, _, load in joining:
            self._join(plan, request, load, now)
        chunks = [(self._batch.request(row), chunk) for row, chunk in schedule.chunks]
        chunks += [(request, chunk) for request, chunk, _ in joining]
        self._hold(schedule, now)
        if not chunks and not self._batch.decoding:
            return None
        leaves, rows, num_decoding = self._batch.take_leaves(), self._batch.snapshot(), len(self._batch.decoding)
        self._advance_decoding(plan)
        for request, count in chunks:
            self._advance_chunk(plan, request, count)
        computed = [(request, request.num_scheduled) for request, _ in chunks]
        self._pipeline.add(rows, plan.num_prefill_tokens, num_decoding, now, computed, plan.holding)
        self._statistics.num_computed_prompt_tokens += plan.num_prefill_tokens
        return plan.build(leaves, schedule.paused)

    def _grant(self, plan: PlanBuilder, row: int, count: int) -> None:
        request = self._batch.request(row)
        self._pages.grant(plan, request, count)
        self._batch.move(request, RowPhase.DECODING)
        self._set_milestone(request)

    def _acquire_all(self, schedule: Schedule) -> list[tuple[Request, int, Load | None]]:
        """Reference the matched pages of all that join, before any page is taken: none may evict another's match."""
        if not schedule.admissions:
            return []
        waiting = {request.key.slot: request for request in self._queue}
        joining = []
        for slot, count in schedule.admissions:
            request = waiting[slot]
            load = self._tiers.loader.take(request)
            num_pages = load.plan.num_pages if load is not None else self._views.match(request).num_pages
            self._checkpoints.begin(request, self._views.due(request, num_pages))
            if load is None:
                request.holding = self._ledger.acquire(self._views.match(request))
            request.match = None
            request.num_published = num_pages
            request.num_known = request.num_tokens
            request.num_scheduled = request.num_published * self._ledger.page_size
            joining.append((request, count, load))
        return joining

    def _join(self, plan: PlanBuilder, request: Request, load: Load | None, now: float) -> None:
        self._pages.join(request)
        self._queue.discard(request)
        request.held_since = None
        request.num_scored_here = 0
        self._count_admission(request, load)
        self._tiers.joined(request, load, now)
        request.advance(RequestStatus.PREFILLING)
        plan.join(request, self._batch.join(request), self._checkpoints.groups)
        self._pages.pass_restores(plan, request)

    def _count_admission(self, request: Request, load: Load | None) -> None:
        if request.cached_tokens is None:
            by_tier = load.cached_tokens(self._ledger.page_size) if load is not None else [request.num_scheduled, 0, 0]
            request.count_cached(by_tier)
            for tier in CacheTier:
                self._statistics.cached_tokens[tier] += by_tier[tier]
            self._statistics.tiers.admitted(by_tier)
            self._statistics.queue_s.observe(request.clock() - request.arrival)

    def _hold(self, schedule: Schedule, now: float) -> None:
        self.hold_deadline = None
        if not schedule.held:
            return
        held = set(schedule.held)
        for request in self._queue:
            if request.key.slot not in held:
                continue
            if request.held_since is None:
                request.held_tokens = self._views.hold_tokens(request)
                request.held_since = now
            deadline = request.held_since + self._costs.recompute_s(request.held_tokens, now)
            self.hold_deadline = deadline if self.hold_deadline is None else min(deadline, self.hold_deadline)

    # --- what the plan just made does to its rows ---

    def _advance_decoding(self, plan: PlanBuilder) -> None:
        reached, step = [], plan.step
        for request in self._batch.decoding.values():
            request.last_step = step
            request.num_scheduled = scheduled = request.num_scheduled + 1
            if scheduled == request.milestone:
                reached.append(request)
        for request in reached:
            self._pages.publish_ready(request)
            self._end_page(plan, request)
            self._settle_row(request)

    def _advance_chunk(self, plan: PlanBuilder, request: Request, count: int) -> None:
        self._pages.extend(plan, request, count)
        plan.chunk(_row(request), count)
        request.last_step = plan.step
        request.num_scheduled += count
        self._pages.publish_ready(request)
        self._checkpoints.computed_chunk(plan, request)
        if request.num_scheduled < request.num_known:
            self._pages.leave_windows(plan, request)
            return
        self._end_page(plan, request)
        request.advance(RequestStatus.DECODING)
        self._settle_row(request)

    def _end_page(self, plan: PlanBuilder, request: Request) -> None:
        """All known tokens are computed in this plan, maybe up to a page's end."""
        self._checkpoints.refresh(plan, request)
        self._pages.leave_windows(plan, request)

    def _settle_row(self, request: Request) -> None:
        """Where a row that has computed all its known tokens belongs for the next plan."""
        if request.num_scheduled + 1 >= request.limit:
            self.depart(request)
        elif request.num_scheduled == self._pages.capacity(request):
            self._batch.move(request, RowPhase.NEEDY)
        else:
            self._batch.move(request, RowPhase.DECODING)
            self._set_milestone(request)

    def _set_milestone(self, request: Request) -> None:
        """When it needs attention next: at its limit, without a page, and where its state is to be kept."""
        milestone = min(self._pages.capacity(request), request.limit - 1)
        if self._checkpoints:
            size = self._ledger.page_size
            milestone = min(milestone, (request.num_scheduled // size + 1) * size)
        request.milestone = milestone

    def publish_ready(self, request: Request) -> None:
        """Tell the index of full pages whose plan is sent and whose tokens are known."""
        self._pages.publish_ready(request)

    # --- leaving ---

    def depart(self, request: Request) -> None:
        """Take a request's row; its pages stay until the plans that name it have ended."""
        if request.row is None:
            return
        self._batch.remove(request)
        self._pages.growth.end(request)
        self.departing.append(request)

    def _preempt(self, request: Request) -> None:
        self.depart(request)
        request.advance(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self._admission.estimate.preempted()
        self._statistics.num_preemptions += 1

    def pop_departed(self) -> list[Request]:
        """Requests whose last plan has ended, out of `departing`; those preempted are back in the queue."""
        if not self.departing:
            return []
        departed = [request for request in self.departing if not self.is_in_flight(request)]
        self.departing = [request for request in self.departing if self.is_in_flight(request)]
        preempted = [request for request in departed if request.status is RequestStatus.PREEMPTED]
        for request in preempted:
            self.give_up_pages(request)
            self._queue.add(request)
        return departed

    def is_in_flight(self, request: Request) -> bool:
        """True while a plan that names it has not ended."""
        return request.last_step > self._pipeline.ended_step

    def give_up_pages(self, request: Request) -> int | None:
        """Release all pages of a request that no plan names; those in the index stay there.

        Returns the place of the checkpoint that its newest state has become, if it has.
        """
        place = self._checkpoints.settle(request)
        self._pages.release(request)
        return place

    def plan_ended(self, record: PlanRecord) -> None:
        """All ranks have run it: what it was the last to use comes back."""
        if record.holding is not None:
            self._ledger.release(record.holding)

    def flush(self, request: Request) -> None:
        """Nobody is to find what the request has computed so far."""
        self._checkpoints.flush(request)

    def forget_pages(self, request: Request, first: int, even_if_shared: bool) -> None:
        """Take its pages [first, ...) out of the index; pages that others use only when told so."""
        self._checkpoints.cut(request, first)
        self._pages.forget(request, first, even_if_shared)


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
