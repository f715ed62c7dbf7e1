"""Checkpoints of states that exist for one boundary only: where they are made, and when they get their names."""

from collections.abc import Sequence

from serve.router.ledger import Reservation, StateLedger
from serve.router.page_needs import REFRESHED
from serve.router.request import Request
from serve.router.statistics import RouterStatistics
from serve.router.step_plan import PlanBuilder
from serve.types import FinishReason

_KEPT = (None, FinishReason.STOP, FinishReason.LENGTH)


class Checkpointer:
    """Puts snapshots into plans. Counts are in tokens.

    A checkpoint of a prompt is published when the plan that makes it is sent: what restores it comes in a later plan.
    While decoding one page of the request is made anew at each boundary. It has no name, so nobody reads it, until no
    plan names the request any more.
    interval: a prompt's state is kept every so many tokens at least, rounded up to pages.
    """

    def __init__(self, ledger: StateLedger, interval: int, statistics: RouterStatistics) -> None:
        self._ledger = ledger
        self._size = ledger.page_size
        self._interval = -(-interval // self._size) * self._size
        self._statistics = statistics
        self.groups = tuple(name for name, group in ledger.groups.items() if group.spec.has_checkpoints)

    def __bool__(self) -> bool:
        """The model has such states."""
        return bool(self.groups)

    def due(self, num_tokens: int, num_cached: int, num_known_pages: int) -> list[int]:
        """Boundaries in (num_cached, num_tokens) where a prefill ends a chunk and keeps its state, ascending.

        num_known_pages: pages of the prefix that another request has computed; this one leaves it there.
        """
        if not self.groups:
            return []
        first = (num_cached // self._interval + 1) * self._interval
        wanted = {*range(first, num_tokens, self._interval), self._last_boundary(num_tokens)}
        wanted.add(num_known_pages * self._size)
        return sorted(boundary for boundary in wanted if num_cached < boundary < num_tokens)

    def _last_boundary(self, num_tokens: int) -> int:
        """Of a prompt, the one that the same prompt can use: its last token is always computed."""
        return (num_tokens - 1) // self._size * self._size

    def begin(self, request: Request, due: Sequence[int]) -> None:
        """The request joins the batch."""
        request.checkpoints_due = list(due)
        request.refreshed = 0
        request.is_flushed = False

    def computed_chunk(self, plan: PlanBuilder, request: Request) -> None:
        """The plan computes known tokens up to `num_scheduled`."""
        boundary, is_due = request.num_scheduled, False
        while request.checkpoints_due and request.checkpoints_due[0] <= boundary:
            is_due = request.checkpoints_due.pop(0) == boundary
        if is_due and not request.is_flushed:
            self._keep(plan, request, boundary)

    def _keep(self, plan: PlanBuilder, request: Request, boundary: int) -> None:
        """A checkpoint with a name, in all groups that lack it, or in none."""
        name = request.names[boundary // self._size - 1]
        missing = [group for group in self.groups if name not in self._ledger.groups[group].index]
        if not missing:
            return
        held = plan.hold(self._ledger)
        pages = self._reserved_pages(plan, request) if boundary == self._last_boundary(request.num_known) else {}
        if not pages:
            if self._ledger.reserve(held, dict.fromkeys(missing, 1)) is not Reservation.GRANTED:
                self._statistics.num_snapshots_skipped += 1
                return
            pages = {group: held.pages[group][-1] for group in missing}
        for group in missing:
            self._ledger.publish(group, pages[group], name, request.root)
            plan.snapshot(request, group, pages[group])
        self._statistics.num_snapshots += 1

    def _reserved_pages(self, plan: PlanBuilder, request: Request) -> dict[str, int]:
        """The pages that it has for the prompt's last boundary, now the plan's; none when they are used."""
        assert request.holding is not None
        if any(len(request.holding.pages[group]) <= REFRESHED + 1 for group in self.groups):
            return {}
        held = plan.hold(self._ledger)
        return {group: self._ledger.pass_last(request.holding, group, held) for group in self.groups}

    def refresh(self, plan: PlanBuilder, request: Request) -> None:
        """The plan computes the last of the known tokens, or a sampled one; keep the state if that ends a page."""
        if not self.groups or request.num_scheduled % self._size or request.is_flushed:
            return
        assert request.holding is not None
        request.refreshed = request.num_scheduled
        for group in self.groups:
            plan.snapshot(request, group, request.holding.pages[group][REFRESHED])

    def flush(self, request: Request) -> None:
        """Nothing that it has computed so far is to be found, and so no state that follows."""
        request.is_flushed, request.refreshed = True, 0

    def cut(self, request: Request, num_pages: int) -> None:
        """Only the first `num_pages` pages of its prefix are worth keeping."""
        if request.refreshed > num_pages * self._size:
            request.refreshed = 0

    def settle(self, request: Request) -> int | None:
        """No plan names it any more, and its pages are still held: the refreshed state gets its name, if it is good.

        Returns the place of the page that ends there.
        """
        place, request.checkpoints_due = request.refreshed // self._size - 1, []
        if place < 0 or request.holding is None or request.finish_reason not in _KEPT or place >= len(request.names):
            return None
        for group in self.groups:
            self._ledger.publish(group, request.holding.pages[group][REFRESHED], request.names[place], request.root)
        request.refreshed = 0
        return place
