"""The scheduler's view of queue, batch and ledger, made cheaply: what needs no decision is left out."""

from collections.abc import Mapping, Set

from serve.router.batch import Batch
from serve.router.checkpoints import Checkpointer
from serve.router.cost_model import CostModel
from serve.router.ledger import PrefixMatch, StateLedger
from serve.router.page_needs import PageNeeds
from serve.router.queue import WaitingQueue
from serve.router.request import Request
from serve.router.scheduler import Blocked, Candidate, PageNeed, PrefillRow, SchedulerLimits, SchedulerView, Victim
from serve.router.step_plan import Pipeline
from serve.router.tiers import Tiers
from serve.types import RequestStatus

MAX_CANDIDATES = 32


class ViewMaker:
    """Reads what others own; changes nothing but the matches that requests remember."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queue: WaitingQueue,
        batch: Batch,
        ledger: StateLedger,
        needs: PageNeeds,
        checkpoints: Checkpointer,
        costs: CostModel,
        pipeline: Pipeline,
        tiers: Tiers,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._batch = batch
        self._ledger = ledger
        self._needs = needs
        self._checkpoints = checkpoints
        self._costs = costs
        self._pipeline = pipeline
        self._tiers = tiers
        specs = [group.spec for group in ledger.groups.values()]
        self._growing = frozenset(spec.name for spec in specs if not spec.has_checkpoints)
        self._windows = tuple(spec.name for spec in specs if spec.has_window)
        self._no_match = PrefixMatch(0, {group: [] for group in ledger.groups})

    def view(
        self,
        now: float,
        is_admitting: bool,
        expected_growth: Mapping[str, int],
        pages_coming: bool,
        blocked: Blocked | None,
    ) -> SchedulerView:
        """The view of this moment. blocked: what the last schedule stopped at."""
        batch = self._batch
        room = self._ledger.room()
        needs = tuple(PageNeed(row) for row, _ in _by_age(batch.needy)) if batch.needy else ()
        is_short = not pages_coming and self.lacks_pages(room)
        may_admit = is_admitting and len(self._queue) > 0 and batch.num_free_rows > 0
        arriving = self._arriving() if may_admit else frozenset()
        candidates = self._candidates(now, blocked, arriving) if may_admit else ()
        return SchedulerView(
            num_decoding=len(batch.decoding),
            free_rows=batch.num_free_rows,
            room=room,
            expected_growth=self._with_reserved(expected_growth, candidates),
            needs=needs,
            prefilling=self._prefill_rows() if batch.prefilling else (),
            candidates=candidates,
            victims=self._victims() if is_short else (),
            computing=arriving if candidates else frozenset(),
            pages_coming=pages_coming,
            leaving={group: self._pipeline.num_leaving(group) for group in self._windows},
            growing=self._growing,
        )

    def lacks_pages(self, room: Mapping[str, int]) -> bool:
        """Not every decoding row that needs a page can have one, or prefilling rows may stall at a window."""
        num_rows = len(self._batch.needy)
        if num_rows and any(room[group] < num_rows for group in self._growing):
            return True
        if not self._windows or not self._batch.prefilling:
            return False
        return any(room[group] + self._pipeline.num_leaving(group) <= 0 for group in self._windows)

    def _with_reserved(self, growth: Mapping[str, int], candidates: tuple[Candidate, ...]) -> Mapping[str, int]:
        """Growth, with what requests that load and stand before the first candidate will ask for."""
        if not candidates or not len(self._tiers.loader):
            return growth
        reserved = self._tiers.reserved(next(r for r in self._queue if r.key.slot == candidates[0].slot))
        return {group: count + reserved.get(group, 0) for group, count in growth.items()}

    def _prefill_rows(self) -> tuple[PrefillRow, ...]:
        return tuple(self._prefill_row(row, request) for row, request in _by_age(self._batch.prefilling))

    def _prefill_row(self, row: int, request: Request) -> PrefillRow:
        stop = request.checkpoints_due[0] if request.checkpoints_due else None
        holding = request.holding
        assert holding is not None
        ends = {group: holding.end(group) for group in self._windows}
        return PrefillRow(row, request.num_scheduled, request.num_known, stop, ends)

    def _victims(self) -> tuple[Victim, ...]:
        youngest_first = self._batch.running()[:0:-1]  # all but the oldest
        return tuple(Victim(r.row, self._exclusive(r)) for r in youngest_first if r.row is not None)

    def _exclusive(self, request: Request) -> dict[str, int]:
        assert request.holding is not None
        return self._ledger.num_exclusive(request.holding)

    def computing(self) -> frozenset[bytes]:
        """Names of the pages that rows compute next, as far as anybody may wait for them.

        Of a model with checkpoints: of the pages that end where a row will keep its state next.
        """
        if not self._batch.prefilling or not len(self._queue):
            return frozenset()
        rows = self._batch.prefilling.values()
        if self._checkpoints:
            size = self._ledger.page_size
            return frozenset(r.names[r.checkpoints_due[0] // size - 1] for r in rows if r.checkpoints_due)
        return frozenset(r.names[r.num_published] for r in rows if r.num_published < len(r.names))

    def _arriving(self) -> Set[bytes]:
        """Names that are worth waiting for: pages that rows compute next, and those that are being loaded."""
        return self.computing() | self._tiers.coming

    def _candidates(self, now: float, blocked: Blocked | None, arriving: Set[bytes]) -> tuple[Candidate, ...]:
        """Waiting requests that this step might admit: no more than could get tokens, one while the pool is full."""
        budget = self._limits.batch_max_tokens - len(self._batch.decoding) - len(self._batch.prefilling)
        if budget <= 0:
            return ()
        most = 1 if blocked is Blocked.PAGES else MAX_CANDIDATES
        candidates: list[Candidate] = []
        first_names: set[bytes | None] = set()
        for request in self._queue:
            if request.status is RequestStatus.LOOKING_UP or not self._tiers.is_candidate(request, now):
                continue
            candidate = self._candidate(request, now, arriving)
            candidates.append(candidate)
            if candidate.first_name is None or candidate.first_name not in first_names:  # others will be held
                first_names.add(candidate.first_name)
                budget -= candidate.num_known - candidate.num_cached
            if len(candidates) == most or budget <= 0:
                break
        return tuple(candidates)

    def _candidate(self, request: Request, now: float, arriving: Set[bytes]) -> Candidate:
        load = self._tiers.loaded(request)
        return self._unloaded(request, now, arriving) if load is None else self._loaded(request, load.plan.num_pages)

    def _loaded(self, request: Request, num_pages: int) -> Candidate:
        """It holds its prefix already."""
        due = self.due(request, num_pages)
        return Candidate(
            slot=request.key.slot,
            num_cached=num_pages * self._ledger.page_size,
            num_known=request.num_tokens,
            new_pages=self._needs.joining(request, num_pages),
            growth=self._needs.growth(request, num_pages),
            idle_hits=dict.fromkeys(self._ledger.groups, 0),
            first_name=self._first_name(request, num_pages, due),
            stop=self._stop(request, num_pages, due),
        )

    def _unloaded(self, request: Request, now: float, arriving: Set[bytes]) -> Candidate:
        match = self.match(request)
        num_pages = match.num_pages
        due = self.due(request, num_pages)
        first_name = self._first_name(request, num_pages, due)
        num_cached = num_pages * self._ledger.page_size
        is_usable = num_cached + self._ledger.page_size < request.num_tokens and not request.wants_prompt_logprobs
        held_s = now - request.held_since if request.held_since is not None else 0.0
        return Candidate(
            slot=request.key.slot,
            num_cached=num_cached,
            num_known=request.num_tokens,
            new_pages=self._needs.joining(request, num_pages),
            growth=self._needs.growth(request, num_pages),
            idle_hits=self._ledger.num_idle(match),
            wanted_name=self._wanted_name(request, num_pages, first_name, arriving) if is_usable else None,
            first_name=first_name,
            held_s=held_s,
            hold_limit_s=self._costs.recompute_s(self.hold_tokens(request), now) if is_usable else 0.0,
            stop=self._stop(request, num_pages, due),
        )

    def due(self, request: Request, num_pages: int) -> list[int]:
        """Where its prefill keeps its state, behind a cached prefix of `num_pages` pages."""
        if not self._checkpoints:
            return []
        num_known = self.match(request).num_known
        if request.found is not None:
            num_known = max(num_known, self._tiers.num_known(request))
        return self._checkpoints.due(request.num_tokens, num_pages * self._ledger.page_size, num_known)

    def _stop(self, request: Request, num_pages: int, due: list[int]) -> int | None:
        if not self._windows and not due:
            return None
        return min([self._needs.first_stop(request, num_pages), *due[:1]])

    def _first_name(self, request: Request, num_pages: int, due: list[int]) -> bytes | None:
        """Name of the first page that others can use once this request has computed it."""
        if self._checkpoints:
            return request.names[due[0] // self._ledger.page_size - 1] if due else None
        return request.names[num_pages] if num_pages < len(request.names) else None

    def _wanted_name(
        self, request: Request, num_pages: int, first_name: bytes | None, arriving: Set[bytes]
    ) -> bytes | None:
        """The page to wait for, if it comes: the next one, or any where a state is being kept."""
        if not self._checkpoints:
            return first_name
        usable = (request.num_tokens - 1) // self._ledger.page_size
        return next((name for name in request.names[num_pages:usable] if name in arriving), first_name)

    def hold_tokens(self, request: Request) -> int:
        """How long waiting for another's prefill may last, in tokens of prefill: until recomputing would be done.

        That is what it misses and what the batch has to prefill before; fixed when it begins to wait.
        """
        if request.held_since is not None:
            return request.held_tokens
        backlog = sum(row.num_known - row.num_scheduled for row in self._batch.prefilling.values())
        return backlog + request.num_tokens - self.match(request).num_pages * self._ledger.page_size

    def match(self, request: Request) -> PrefixMatch:
        """The request's match with the index of now; remembered until the index changes."""
        if request.wants_prompt_logprobs:
            return self._no_match
        if request.match is None or request.match_version != self._ledger.index_version:
            request.match = self._ledger.match(request.names, request.num_tokens)
            request.match_version = self._ledger.index_version
        return request.match


def _by_age(rows: dict[int, Request]) -> list[tuple[int, Request]]:
    return sorted(rows.items(), key=lambda item: item[1].sort_key)
