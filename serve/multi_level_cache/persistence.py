"""Persistence: READY pages on their way down to a secondary tier, as far as the rules want them there.

In nobody's way: what finds no room is left out.
"""

from collections import deque

from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.page_state import DropReason, PageKey, PageObject, PageUse, PageUser, TierTicket
from serve.multi_level_cache.persist_policy import PersistRules
from serve.multi_level_cache.promotion import slot_views
from serve.multi_level_cache.secondary_tier import SecondaryTier, StoreRequest, TransferOutcome, TransferResult
from serve.types import Durability, PageContent

MAX_IN_FLIGHT_SHARE = 0.05
MAX_CANDIDATES = 65536
NUM_NEXT_VICTIMS, VICTIMS_PERIOD_S = 64, 0.1


class Persister:
    """Owns all stores into one tier: VOLATILE -> PERSISTING -> DURABLE, or back."""

    def __init__(self, host: HostTier, tier: SecondaryTier, rules: PersistRules) -> None:
        self._host = host
        self._tier = tier
        self._rules = rules
        self._victims_seen_at = float("-inf")
        self._candidates: deque[PageObject] = deque(maxlen=MAX_CANDIDATES)  # the oldest fall out; they stay VOLATILE
        self._in_flight: dict[TierTicket, PageObject] = {}
        self._slots_in_flight = 0
        self._next_number = 0

    @staticmethod
    def stored_by(page: PageObject, user: PageUser) -> None:
        """A request has claimed the slots of this page."""
        page.use = PageUse(user)

    def wanted_by(self, page: PageObject, user: PageUser) -> None:
        """A request has found the page in the host: it goes down if that was all it lacked."""
        page.use.note(user)
        if page.use.withheld is not None:
            self.offer(page)

    def offer(self, page: PageObject) -> None:
        """The page may be worth keeping; cheap to call again for a page that was refused before."""
        if self._is_candidate(page) and self._passes_rules(page):
            self._candidates.append(page)

    def _passes_rules(self, page: PageObject) -> bool:
        """Ask the rules anew; a page that they keep out is counted once a reason."""
        before, page.use.withheld = page.use.withheld, self._rules.verdict(page.use)
        if page.use.withheld is not None and page.use.withheld is not before:
            self._host.stats.pages_withheld[page.use.withheld.value] += 1
        return page.use.withheld is None

    def offer_next_victims(self) -> None:
        """When room is short: pages that were hit and are not in the tier all the same go first, each once a use.

        The tier may have refused them when they were hit, or others have pushed them out of the queue.
        """
        host = self._host
        now = host.clock()
        is_short = host.pool.num_free < host.budget.num_reserved
        if not is_short or not self._rules.waits_for_hits or now - self._victims_seen_at < VICTIMS_PERIOD_S:
            return
        self._victims_seen_at = now
        for node in host.directory.next_victims(NUM_NEXT_VICTIMS):
            if node.rescued_use == node.last_use:
                continue
            node.rescued_use = node.last_use
            self._candidates.extendleft(
                page for page in node.objects.values() if self._is_candidate(page) and self._passes_rules(page)
            )

    def submit_some(self) -> None:
        """Begin stores as far as the tier and the host's clean reserve allow."""
        while self._candidates:
            page = self._candidates[0]
            if not self._is_candidate(page):
                self._candidates.popleft()
                continue
            if not self._has_room(page):
                return
            self._candidates.popleft()
            self._submit(page)

    def owns(self, ticket: TierTicket) -> bool:
        """Is this one of the stores' tickets?"""
        return ticket in self._in_flight

    def complete(self, result: TransferResult) -> None:
        """A store has ended."""
        page = self._in_flight.pop(result.ticket)
        self._slots_in_flight -= len(page.slots)
        directory, stats = self._host.directory, self._host.stats
        if result.outcome is TransferOutcome.DONE:
            directory.set_durability(page, Durability.DURABLE)
            stats.pages_persisted += 1
        else:
            directory.set_durability(page, Durability.VOLATILE)
            stats.events[f"store_{result.outcome.value}"] += 1
        if result.outcome is TransferOutcome.CORRUPT:
            directory.drop(page, DropReason.CHECKSUM)
        directory.unpin(page, result.ticket)

    def forget(self, key: PageKey) -> None:
        """The tier has dropped an object: the host's page, if any, is VOLATILE again."""
        page = self._host.directory.find_ready(key)
        if page is not None and page.durability is Durability.DURABLE:
            self._host.directory.set_durability(page, Durability.VOLATILE)

    @staticmethod
    def _is_candidate(page: PageObject) -> bool:
        return page.content is PageContent.READY and page.durability is Durability.VOLATILE and page.doomed is None

    def _has_room(self, page: PageObject) -> bool:
        form = self._host.formats[page.key.group]
        limit = max(self._host.pool.num_backed * MAX_IN_FLIGHT_SHARE, len(page.slots))
        if self._slots_in_flight + len(page.slots) > limit or not self._host.budget.can_hold(len(page.slots)):
            return False
        return self._tier.can_accept(form.object_bytes)

    def _submit(self, page: PageObject) -> None:
        node = self._host.directory.node(page.key.name)
        if node is None:
            raise RuntimeError(f"a page that is READY has no node: {page.key}")
        form = self._host.formats[page.key.group]
        self._next_number += 1
        ticket = TierTicket(f"{self._tier.name}.store", self._next_number)
        self._host.directory.pin(page, ticket)
        self._host.directory.set_durability(page, Durability.PERSISTING)
        self._in_flight[ticket] = page
        self._slots_in_flight += len(page.slots)
        checksums = self._host.arena.checksum[page.slots[0], : len(form.unit_bytes)].copy()
        views = slot_views(self._host, page)
        self._tier.submit_store(StoreRequest(ticket, page.key, node.parent, node.root, form, views, checksums))
