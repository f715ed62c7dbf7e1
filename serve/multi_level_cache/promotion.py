"""Promotions: objects on their way from a secondary tier into host slots, and the jobs that wait for them."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.page_state import DropReason, PageKey, PageObject, TierTicket
from serve.multi_level_cache.request_names import WantedObject
from serve.multi_level_cache.secondary_tier import Bytes, LoadRequest, SecondaryTier, TransferOutcome, TransferResult
from serve.multi_level_cache.statistics import TransferSpeed
from serve.types import Durability, JobId

PROBE_IDLE_S, PROBE_WAIT_S = 5.0, 0.5


def slot_views(host: HostTier, page: PageObject) -> list[Bytes]:
    """The object's bytes, slot by slot; the last view ends where the object does."""
    left, views = host.formats[page.key.group].object_bytes, []
    for slot in page.slots:
        views.append(host.arena.payload[slot, : min(left, host.arena.shape.slot_bytes)])
        left -= len(views[-1])
    return views


@dataclass
class Promotion:
    """One object being read. waiters: jobs to tell; the read goes on without any."""

    page: PageObject
    waiters: set[JobId] = field(default_factory=set)


@dataclass(frozen=True)
class FinishedPromotion:
    """page: READY and DURABLE now, or None when it did not come."""

    key: PageKey
    page: PageObject | None
    waiters: set[JobId]


class Promoter:
    """Owns all promotions from one tier, and knows how fast they are. speed: of those lately."""

    def __init__(self, host: HostTier, tier: SecondaryTier) -> None:
        self._host = host
        self._tier = tier
        self._by_ticket: dict[TierTicket, Promotion] = {}
        self._by_key: dict[PageKey, TierTicket] = {}
        self._next_number = 0
        self.speed = TransferSpeed(host.clock)
        self._candidate: tuple[WantedObject, float] | None = None

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which objects could be promoted."""
        return self._tier.contains(keys)

    def is_promoting(self, key: PageKey) -> bool:
        """The object is on its way."""
        return key in self._by_key

    def slots_needed(self, wanted: Sequence[WantedObject]) -> int:
        """Slots that promoting these objects would take, beyond those that are on their way already."""
        return sum(self._host.num_slots(each.key.group) for each in wanted if each.key not in self._by_key)

    def prepare(self, wanted: Sequence[WantedObject], protect: Container[bytes]) -> bool:
        """Make room for all of them, or for none."""
        return self._host.directory.make_room(self.slots_needed(wanted), protect)

    def submit(self, wanted: WantedObject, job: JobId) -> None:
        """Read one object for a job, or join a read that goes on. Room was made by `prepare`."""
        ticket = self._by_key.get(wanted.key)
        if ticket is None:
            ticket = self._start(wanted)
        self._by_ticket[ticket].waiters.add(job)

    def _start(self, wanted: WantedObject) -> TierTicket:
        host, key = self._host, wanted.key
        page = host.directory.begin_fill(key, wanted.parent, wanted.root, host.num_slots(key.group))
        if page is None:
            raise RuntimeError(f"no slots for {key.group} although room was made")
        self._next_number += 1
        ticket = TierTicket(f"{self._tier.name}.load", self._next_number)
        self._by_ticket[ticket] = Promotion(page)
        self._by_key[key] = ticket
        host.budget.num_promoting += len(page.slots)
        self.speed.begin(host.formats[key.group].object_bytes)
        self._tier.submit_load(LoadRequest(ticket, key, host.formats[key.group], slot_views(host, page)))
        return ticket

    def offer_probe(self, wanted: WantedObject) -> None:
        """An object that a lookup found in the tier alone: what `probe` may bring up, should nobody else.

        The one before it stays until it was tried: lookups that follow each other closely must not put the probe off.
        """
        if self._candidate is None:
            self._candidate = wanted, self._host.clock()

    def probe(self) -> None:
        """Bring up one object that was found, when nobody has asked the tier for anything of late. Call it often.

        So one slow read, or a slow hour, does not keep the router from loading for ever: it hears of the speed.
        """
        if self._candidate is None or not self.speed.is_idle:
            return
        wanted, found_at = self._candidate
        now = self._host.clock()
        if now - found_at < PROBE_WAIT_S:  # who found it may be about to ask for it
            return
        self._candidate = None
        if now - self.speed.ended_at < PROBE_IDLE_S or self._host.directory.find(wanted.key) is not None:
            return
        if self._host.budget.can_hold(self.slots_needed([wanted])) and self.prepare([wanted], {wanted.parent}):
            self._start(wanted)
            self._host.stats.events["tier_probes"] += 1

    def leave(self, job: JobId) -> None:
        """The job waits no more; its reads go on for whoever comes next."""
        for promotion in self._by_ticket.values():
            promotion.waiters.discard(job)

    def owns(self, ticket: TierTicket) -> bool:
        """Is this one of the promotions' tickets?"""
        return ticket in self._by_ticket

    def complete(self, result: TransferResult) -> FinishedPromotion:
        """A read has ended: READY and DURABLE, or EMPTY."""
        promotion = self._by_ticket.pop(result.ticket)
        page = promotion.page
        self._by_key.pop(page.key, None)
        self._host.budget.num_promoting -= len(page.slots)
        is_done = result.outcome is TransferOutcome.DONE
        is_corrupt = result.outcome is TransferOutcome.CORRUPT
        was_read = is_done or is_corrupt
        self.speed.end(self._host.formats[page.key.group].object_bytes if was_read else 0)
        is_ready = False
        if is_done:
            self._host.arena.checksum[page.slots[0], : len(result.checksums)] = result.checksums
            is_ready = self._host.directory.publish(page, Durability.DURABLE)
            self._host.stats.pages_promoted += is_ready
        else:
            self._host.directory.abandon(page, DropReason.CHECKSUM if is_corrupt else DropReason.PROMOTION_FAILED)
        return FinishedPromotion(page.key, page if is_ready else None, promotion.waiters)

    def holding(self) -> list[PageObject]:
        """Pages that are being filled by promotions."""
        return [promotion.page for promotion in self._by_ticket.values()]
