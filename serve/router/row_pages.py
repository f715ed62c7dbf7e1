"""The pages of requests that run: taken, handed to the workers, named, left behind and given back."""

from collections.abc import Mapping

from serve.router.ledger import Reservation, StateLedger
from serve.router.page_needs import ExpectedGrowth, PageNeeds
from serve.router.request import Request
from serve.router.step_plan import PlanBuilder


class RowPages:
    """Changes the holdings of requests in the batch, as plans need them. That there is room is the scheduler's care.

    growth: what all that run are still expected to ask for.
    """

    def __init__(self, ledger: StateLedger, needs: PageNeeds) -> None:
        self._ledger = ledger
        self._needs = needs
        self._size = ledger.page_size
        specs = [group.spec for group in ledger.groups.values()]
        self._paged = tuple(spec.name for spec in specs if not spec.has_checkpoints)
        self._windows = tuple(spec for spec in specs if spec.has_window)
        self._unnamed = tuple(spec.name for spec in specs if not spec.is_full)
        self.growth = ExpectedGrowth([spec.name for spec in specs])

    # --- taking pages ---

    def join(self, request: Request) -> None:
        """Take what the request needs beside its prefix of `num_published` pages, in all groups."""
        length = request.num_published
        self.growth.begin(request, self._needs.growth(request, length))
        self._reserve(request, self._needs.joining(request, length))

    def grant(self, plan: PlanBuilder, request: Request, count: int) -> None:
        """`count` further places for a row that decodes."""
        self._give(plan, request, dict.fromkeys(self._paged, count))

    def extend(self, plan: PlanBuilder, request: Request, count: int) -> None:
        """Window pages for the next `count` known tokens."""
        if not self._windows:
            return
        assert request.holding is not None
        end = -(-(request.num_scheduled + count) // self._size)
        missing = {spec.name: end - request.holding.end(spec.name) for spec in self._windows}
        self._give(plan, request, {group: count for group, count in missing.items() if count > 0})

    def _give(self, plan: PlanBuilder, request: Request, counts: Mapping[str, int]) -> None:
        if not counts:
            return
        self._reserve(request, counts)
        assert request.holding is not None
        plan.give(request, {group: request.holding.pages[group][-count:] for group, count in counts.items()})
        for group, count in counts.items():
            self.growth.spend(request, group, count)

    def _reserve(self, request: Request, counts: Mapping[str, int]) -> None:
        assert request.holding is not None
        granted = self._ledger.reserve(request.holding, counts)
        assert granted is Reservation.GRANTED, "the scheduler promised pages that are not there"

    def capacity(self, request: Request) -> int:
        """Tokens that its pages have place for."""
        assert request.holding is not None
        ends = map(request.holding.end, self._paged)
        return min(ends, default=request.limit) * self._size

    # --- what a plan does to them ---

    def pass_restores(self, plan: PlanBuilder, request: Request) -> None:
        """The plan begins with what it was acquired with: later it holds its own."""
        if request.holding is not None and request.holding.restores:
            self._ledger.pass_restores(request.holding, plan.hold(self._ledger))

    def leave_windows(self, plan: PlanBuilder, request: Request) -> None:
        """Pages that no token after this plan can see are given back with its end."""
        for spec in self._windows:
            holding = request.holding
            assert holding is not None
            first = request.num_scheduled // self._size - spec.window_pages
            if first > holding.first(spec.name):
                self._ledger.leave_window(holding, spec.name, first, plan.hold(self._ledger))
            is_prefilling = request.num_scheduled < request.num_known
            most = self._needs.window_peak(spec) if is_prefilling else spec.window_pages + 1
            self._expect(request, spec.name, most)

    def _expect(self, request: Request, group: str, most: int) -> None:
        """Of a group with a window it will not hold more than `most` pages, nor places beyond its limit."""
        assert request.holding is not None
        ahead = -(-request.limit // self._size) - request.holding.end(group)
        self.growth.change(request, group, max(0, min(most - len(request.holding.pages[group]), ahead)))

    def publish_ready(self, request: Request) -> None:
        """Tell the index of full pages whose plan is sent and whose tokens are known.

        FULL pages from behind a flush are of no use without those before; of a window they would be.
        """
        full = min(request.num_scheduled, request.num_tokens) // self._size
        holding = request.holding
        if holding is None:
            return
        for place in range(request.num_published, full):
            for group in self._paged:
                if place >= holding.first(group) and not (request.is_flushed and group in self._unnamed):
                    self._ledger.publish(group, holding.page_at(group, place), request.names[place], request.root)
        request.num_published = max(request.num_published, full)

    # --- giving back ---

    def release(self, request: Request) -> None:
        """Give all pages of a request back that no plan names; those in the index stay there."""
        if request.holding is not None:
            self._ledger.release(request.holding)
            request.holding = None

    def forget(self, request: Request, first: int, even_if_shared: bool) -> None:
        """Take its pages of places from `first` on out of the index; pages that others use only when told so."""
        holding = request.holding
        if holding is None:
            return
        for group in self._paged:
            for page in holding.pages[group][max(0, first - holding.first(group)) :]:
                if even_if_shared or self._ledger.groups[group].refs(page) == 1:
                    self._ledger.forget(group, page)
        if even_if_shared:
            self._forget_names(request, first)

    def _forget_names(self, request: Request, first: int) -> None:
        """What it has made and holds no more: pages that left its windows, and checkpoints."""
        for group in self._unnamed:
            index = self._ledger.groups[group].index
            for name in request.names[first:]:
                page = index.page(name)
                if page is not None:
                    self._ledger.forget(group, page)
