"""Load jobs: objects pinned for the ranks to copy, after promotion from a lower tier where that is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve.ipc.messages import Acquire, AcquireReply
from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.leases import Lease, LeaseKind, LeasePhase
from serve.multi_level_cache.page_state import DropReason, PageKey, PageObject, PageUser
from serve.multi_level_cache.persistence import Persister
from serve.multi_level_cache.promotion import FinishedPromotion, Promoter
from serve.multi_level_cache.request_names import WantedObject, as_ranges
from serve.types import AcquireOutcome, JobId, JobResult


@dataclass
class PendingLoad:
    """A grant in the making. pages: pinned so far; waiting: promotions that it waits for."""

    lease: Lease
    user: PageUser
    wanted: Sequence[WantedObject]
    pages: dict[PageKey, PageObject]
    waiting: set[PageKey] = field(default_factory=set)
    num_promoted: int = 0


class LoadHandler:
    """Grants acquires, all objects or none, and ends them. `reply` sends an answer: at once, or after promotions."""

    def __init__(
        self,
        host: HostTier,
        promoter: Promoter | None,
        persister: Persister | None,
        reply: Callable[[AcquireReply], None],
    ) -> None:
        self._host = host
        self._promoter = promoter
        self._persister = persister
        self._reply = reply
        self._pending: dict[JobId, PendingLoad] = {}

    def acquire(
        self, message: Acquire, wanted: Sequence[WantedObject], chain: Sequence[bytes], num_prompt: int
    ) -> None:
        """Pin and promote all of `wanted`, or say what is missing. num_prompt: tokens of the request's prompt."""
        ready, lower, missing = self._locate(wanted)
        if missing:
            self._refuse(message.job, AcquireOutcome.MISSING, missing)
        elif not self._may_hold(ready, lower):
            self._refuse(message.job, AcquireOutcome.BUSY)
        else:
            self._grant(message, num_prompt, wanted, ready, lower, set(chain))

    def _locate(
        self, wanted: Sequence[WantedObject]
    ) -> tuple[dict[PageKey, PageObject], list[WantedObject], list[WantedObject]]:
        """READY pages, objects that lower tiers have or are sending, and those that nobody has."""
        ready: dict[PageKey, PageObject] = {}
        absent: dict[PageKey, WantedObject] = {}
        for each in wanted:
            page = self._host.directory.find_ready(each.key)
            if page is not None:
                ready[each.key] = page
            else:
                absent[each.key] = each
        below = self._below(list(absent))
        lower = [each for key, each in absent.items() if key in below]
        return ready, lower, [each for each in wanted if each.key in absent and each.key not in below]

    def _below(self, keys: list[PageKey]) -> set[PageKey]:
        """Which of these are promoted now, or could be. Pages that a store job is filling are not."""
        if self._promoter is None:
            return set()
        free = [key for key in keys if self._host.directory.find(key) is None]
        found = {key for key, there in zip(free, self._promoter.contains(free), strict=True) if there}
        return found | {key for key in keys if self._promoter.is_promoting(key)}

    def _may_hold(self, ready: dict[PageKey, PageObject], lower: Sequence[WantedObject]) -> bool:
        slots = sum(len(page.slots) for page in ready.values() if not page.pins)
        if self._promoter is not None:
            slots += self._promoter.slots_needed(lower)
        return self._host.budget.can_hold(slots)

    def _grant(
        self,
        message: Acquire,
        num_prompt: int,
        wanted: Sequence[WantedObject],
        ready: dict[PageKey, PageObject],
        lower: Sequence[WantedObject],
        protect: set[bytes],
    ) -> None:
        host = self._host
        host.directory.touch(protect)
        if self._promoter is not None and lower and not self._promoter.prepare(lower, protect):
            self._refuse(message.job, AcquireOutcome.BUSY)
            return
        phase = LeasePhase.PROMOTING if lower else LeasePhase.OFFERED
        lease = host.leases.open(message.job, LeaseKind.LOAD, [], message.num_ranks, message.deadline_s, phase)
        user = PageUser(message.slot, message.generation, num_prompt)
        pending = PendingLoad(lease, user, wanted, {}, {each.key for each in lower}, len(lower))
        for page in ready.values():
            self._pin(pending, page)
        if self._promoter is None or not lower:
            self._offer(pending)
            return
        self._pending[message.job] = pending
        for each in lower:
            self._promoter.submit(each, message.job)

    def complete_promotion(self, finished: FinishedPromotion) -> None:
        """A promotion has ended: pin the page for all jobs that waited for it, or fail them."""
        for job in finished.waiters:
            pending = self._pending.get(job)
            if pending is None:
                continue
            if finished.page is None or finished.page.doomed is not None:
                missing = [each for each in pending.wanted if each.key == finished.key]
                self.lapse(pending.lease, missing)
                continue
            self._pin(pending, finished.page)
            pending.waiting.discard(finished.key)
            if not pending.waiting:
                del self._pending[job]
                pending.lease.move(LeasePhase.OFFERED)
                self._offer(pending)

    def complete(self, lease: Lease, bad_slots: set[int]) -> None:
        """All ranks have answered: unpin; pages whose bytes did not match their checksums are dropped."""
        for page in lease.pages:
            if page.slots[0] in bad_slots:
                self._host.directory.drop(page, DropReason.CHECKSUM)
            elif all(result is JobResult.DONE for result in lease.answers.values()):
                self._host.stats.bytes_loaded += self._host.formats[page.key.group].object_bytes
        self.unpin(lease)

    def lapse(self, lease: Lease, missing: Sequence[WantedObject] = ()) -> None:
        """End a lease that has not begun; one that waits for promotions gets its (negative) reply now."""
        pending = self._pending.pop(lease.job, None)
        self._host.leases.lapse(lease)
        self.unpin(lease)
        if pending is None:
            return
        if self._promoter is not None:
            self._promoter.leave(lease.job)
        self._refuse(lease.job, AcquireOutcome.MISSING if missing else AcquireOutcome.BUSY, missing)

    def unpin(self, lease: Lease) -> None:
        """Let go of the lease's pages."""
        pages, lease.pages = lease.pages, []
        for page in pages:
            self._host.directory.unpin(page, lease.job)

    def forget(self, lease: Lease) -> None:
        """The lease ended with its engine group: no reply."""
        if self._pending.pop(lease.job, None) is not None and self._promoter is not None:
            self._promoter.leave(lease.job)
        self.unpin(lease)

    def _pin(self, pending: PendingLoad, page: PageObject) -> None:
        self._host.directory.pin(page, pending.lease.job)
        pending.lease.pages.append(page)
        pending.pages[page.key] = page
        if self._persister is not None:
            self._persister.wanted_by(page, pending.user)

    def _offer(self, pending: PendingLoad) -> None:
        num_ranges = max((each.range_index for each in pending.wanted), default=-1) + 1
        slots: list[list[int]] = [[] for _ in range(num_ranges)]
        generations: list[list[int]] = [[] for _ in range(num_ranges)]
        for each in pending.wanted:
            page = pending.pages[each.key]
            slots[each.range_index] += page.slots
            generations[each.range_index] += page.generations
        self._host.stats.loads_granted += 1
        job, promoted = pending.lease.job, pending.num_promoted
        self._reply(AcquireReply(job, AcquireOutcome.GRANTED, slots=slots, generations=generations, promoted=promoted))

    def _refuse(self, job: JobId, outcome: AcquireOutcome, missing: Sequence[WantedObject] = ()) -> None:
        self._host.stats.loads_refused[outcome.name.lower()] += 1
        self._reply(AcquireReply(job, outcome, missing=as_ranges(missing)))
