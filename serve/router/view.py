"""The scheduler's view of queue, batch and ledger, made cheaply: what needs no decision is left out."""

from serve.router.admission import Admission
from serve.router.batch import Batch
from serve.router.cost_model import CostModel
from serve.router.ledger import PrefixMatch, StateLedger
from serve.router.queue import WaitingQueue
from serve.router.request import Request
from serve.router.scheduler import Blocked, Candidate, PageNeed, PrefillRow, SchedulerLimits, SchedulerView, Victim
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
        admission: Admission,
        costs: CostModel,
        tiers: Tiers,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._batch = batch
        self._ledger = ledger
        self._admission = admission
        self._costs = costs
        self._tiers = tiers
        self._no_match = PrefixMatch(0, {group: [] for group in ledger.groups})

    def view(
        self, now: float, is_admitting: bool, expected_growth: int, pages_coming: bool, blocked: Blocked | None
    ) -> SchedulerView:
        """The view of this moment. blocked: what the last schedule stopped at."""
        batch = self._batch
        room = self._ledger.room()
        needs = tuple(PageNeed(row) for row, _ in _by_age(batch.needy)) if batch.needy else ()
        is_short = bool(needs) and not pages_coming and min(room.values()) < len(needs)
        candidates = self._candidates(now, blocked) if is_admitting and len(self._queue) else ()
        return SchedulerView(
            num_decoding=len(batch.decoding),
            free_rows=batch.num_free_rows,
            room=room,
            expected_growth=expected_growth + self._reserved(candidates),
            needs=needs,
            prefilling=self._prefill_rows() if batch.prefilling else (),
            candidates=candidates,
            victims=self._victims() if is_short else (),
            computing=self.computing() | self._tiers.coming if candidates else frozenset(),
            pages_coming=pages_coming,
        )

    def _reserved(self, candidates: tuple[Candidate, ...]) -> int:
        """What requests that load and stand before the first candidate will ask for."""
        if not candidates or not len(self._tiers.loader):
            return 0
        return self._tiers.reserved(next(r for r in self._queue if r.key.slot == candidates[0].slot))

    def _prefill_rows(self) -> tuple[PrefillRow, ...]:
        rows = _by_age(self._batch.prefilling)
        return tuple(PrefillRow(row, r.num_scheduled, r.num_known) for row, r in rows)

    def _victims(self) -> tuple[Victim, ...]:
        youngest_first = self._batch.running()[:0:-1]  # all but the oldest
        return tuple(Victim(r.row, self._exclusive(r)) for r in youngest_first if r.row is not None)

    def _exclusive(self, request: Request) -> dict[str, int]:
        assert request.holding is not None
        return self._ledger.num_exclusive(request.holding)

    def computing(self) -> frozenset[bytes]:
        """Names of the pages that rows compute next, as far as anybody may wait for them."""
        if not self._batch.prefilling or not len(self._queue):
            return frozenset()
        rows = self._batch.prefilling.values()
        return frozenset(r.names[r.num_published] for r in rows if r.num_published < len(r.names))

    def _candidates(self, now: float, blocked: Blocked | None) -> tuple[Candidate, ...]:
        """Waiting requests that this step might admit: no more than could get tokens, one while the pool is full."""
        budget = self._limits.batch_max_tokens - len(self._batch.decoding) - len(self._batch.prefilling)
        if not self._batch.num_free_rows or budget <= 0:
            return ()
        most = 1 if blocked is Blocked.PAGES else MAX_CANDIDATES
        candidates: list[Candidate] = []
        first_names: set[bytes | None] = set()
        for request in self._queue:
            if request.status is RequestStatus.LOOKING_UP or not self._tiers.is_candidate(request, now):
                continue
            candidate = self._candidate(request, now)
            candidates.append(candidate)
            if candidate.first_name is None or candidate.first_name not in first_names:  # others will be held
                first_names.add(candidate.first_name)
                budget -= candidate.num_known - candidate.num_cached
            if len(candidates) == most or budget <= 0:
                break
        return tuple(candidates)

    def _candidate(self, request: Request, now: float) -> Candidate:
        load = self._tiers.loaded(request)
        return self._unloaded(request, now) if load is None else self._loaded(request, load.plan.num_pages)

    def _loaded(self, request: Request, num_pages: int) -> Candidate:
        """It holds its prefix already."""
        return Candidate(
            slot=request.key.slot,
            num_cached=num_pages * self._ledger.page_size,
            num_known=request.num_tokens,
            new_pages=self._admission.pages_for(request.num_tokens) - num_pages,
            growth=self._admission.expected_growth(request),
            idle_hits=dict.fromkeys(self._ledger.groups, 0),
            first_name=request.names[num_pages] if num_pages < len(request.names) else None,
        )

    def _unloaded(self, request: Request, now: float) -> Candidate:
        match = self.match(request)
        num_cached = match.num_pages * self._ledger.page_size
        names = request.names
        first_name = names[match.num_pages] if match.num_pages < len(names) else None
        is_usable = num_cached + self._ledger.page_size < request.num_tokens and not request.wants_prompt_logprobs
        held_s = now - request.held_since if request.held_since is not None else 0.0
        return Candidate(
            slot=request.key.slot,
            num_cached=num_cached,
            num_known=request.num_tokens,
            new_pages=self._admission.pages_for(request.num_tokens) - match.num_pages,
            growth=self._admission.expected_growth(request),
            idle_hits=self._ledger.num_idle(match),
            wanted_name=first_name if is_usable else None,
            first_name=first_name,
            held_s=held_s,
            hold_limit_s=self._costs.recompute_s(self.hold_tokens(request), now) if is_usable else 0.0,
        )

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
