"""Store jobs: claims on slots, and what becomes of their pages."""

from collections.abc import Callable, Sequence
from itertools import groupby

from serve.ipc.messages import Claim, ClaimReply
from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.leases import Lease, LeaseKind, LeasePhase
from serve.multi_level_cache.page_state import DropReason, PageObject, PageUser
from serve.multi_level_cache.persistence import Persister
from serve.multi_level_cache.request_names import WantedObject
from serve.types import JobId


class ClaimHandler:
    """Grants claims and ends them. reach: told of each kill point that is passed."""

    def __init__(
        self, host: HostTier, persister: Persister | None, reach: Callable[[str], None] = lambda point: None
    ) -> None:
        self._host = host
        self._reach = reach
        self._persister = persister

    def grant(self, claim: Claim, wanted: Sequence[WantedObject], chain: Sequence[bytes]) -> ClaimReply:
        """Slots for what the host lacks, page by page from the first on. chain: names not to be evicted for it."""
        self._host.directory.touch(chain)
        user = PageUser(claim.slot, claim.generation, claim.num_prompt)
        absent = self._absent(wanted, user)
        protect = set(chain)
        boundaries = [absent] if claim.atomic else _by_page(absent)
        granted: list[tuple[WantedObject, PageObject]] = []
        for boundary in boundaries:
            filled = self._fill(boundary, protect, user)
            if filled is None:
                break  # what continues a page is of no use without it
            granted += filled
        if granted:
            pages = [page for _, page in granted]
            self._host.leases.open(
                claim.job, LeaseKind.STORE, pages, claim.num_ranks, claim.deadline_s, LeasePhase.OFFERED
            )
        stats = self._host.stats
        stats.pages_granted += len(granted)
        stats.pages_refused += len(absent) - len(granted)
        return ClaimReply(
            claim.job,
            [(each.key.group, each.page_index, list(page.slots), list(page.generations)) for each, page in granted],
            num_present=len(wanted) - len(absent),
            num_refused=len(absent) - len(granted),
        )

    def _absent(self, wanted: Sequence[WantedObject], user: PageUser) -> list[WantedObject]:
        """What the host neither has nor is being given, each once; the rest is offered to the lower tier again."""
        absent: dict[object, WantedObject] = {}
        for each in wanted:
            page = self._host.directory.find(each.key)
            if page is None:
                absent.setdefault(each.key, each)
            elif self._persister is not None:
                self._persister.wanted_by(page, user)
                self._persister.offer(page)
        return list(absent.values())

    def _fill(
        self, boundary: Sequence[WantedObject], protect: set[bytes], user: PageUser
    ) -> list[tuple[WantedObject, PageObject]] | None:
        """FILLING pages for all objects of a boundary, or None."""
        host = self._host
        sizes = [host.num_slots(each.key.group) for each in boundary]
        if not host.budget.can_fill(sum(sizes)) or not host.directory.make_room(sum(sizes), protect):
            return None
        filled = []
        for each, size in zip(boundary, sizes, strict=True):
            page = host.directory.begin_fill(each.key, each.parent, each.root, size)
            if page is None:
                raise RuntimeError("no slots although room was made")
            if self._persister is not None:
                self._persister.stored_by(page, user)
            filled.append((each, page))
        return filled

    def complete(self, lease: Lease) -> None:
        """All ranks have answered: READY if all are done, otherwise EMPTY."""
        if not lease.is_done:
            self.abandon(lease, DropReason.STORE_FAILED)
            return
        stats = self._host.stats
        for page in lease.pages:
            self._reach("manager.before_publish")
            is_ready = self._host.directory.publish(page)
            self._reach("manager.after_publish")
            if is_ready:
                stats.pages_published += 1
                stats.bytes_stored += self._host.formats[page.key.group].object_bytes
                if self._persister is not None:
                    self._persister.offer(page)

    def abandon(self, lease: Lease, reason: DropReason) -> None:
        """The pages will not be complete: EMPTY."""
        for page in lease.pages:
            self._host.directory.abandon(page, reason)

    def guard_lapsed(self, job: JobId) -> None:
        """A job works on a claim that had lapsed: whatever is in its slots now cannot be trusted, nor be reused yet."""
        lapsed = self._host.leases.lapsed(job)
        if lapsed is None:
            return
        touched = set(lapsed.slots)
        if len(lapsed.answered) == lapsed.num_ranks:
            self._host.pool.unblock(job)
        else:
            self._host.pool.block(touched, job)
        for node in list(self._host.directory.nodes()):
            for page in list(node.objects.values()):
                if touched.intersection(page.slots):
                    self._host.directory.drop(page, DropReason.OVERRUN)


def _by_page(wanted: Sequence[WantedObject]) -> list[list[WantedObject]]:
    """Objects grouped by page, pages in order."""
    ordered = sorted(wanted, key=lambda each: each.page_index)
    return [list(objects) for _, objects in groupby(ordered, key=lambda each: each.page_index)]
