"""The cache manager: alone decides about host slots, and answers the router and the workers.

It runs on one thread: messages by `handle`, the launcher's news by `engine_up` and `engine_down`, the lower tier's
results by `poll_tier`, and time by `tick`, which must come after every message that has arrived was handled.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from serve.ipc.messages import (
    Acquire,
    AcquireReply,
    Begin,
    Claim,
    ClaimReply,
    JobAnswer,
    LeaseLost,
    Message,
    Probe,
    ProbeReply,
    Release,
    Resync,
    SlotsInUse,
)
from serve.multi_level_cache.arena_growth import Growth
from serve.multi_level_cache.claims import ClaimHandler
from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.leases import AnswerOutcome, BeginOutcome, Lease, LeaseKind, LeasePhase
from serve.multi_level_cache.loads import LoadHandler
from serve.multi_level_cache.page_state import DropReason, PageKey, PageUser
from serve.multi_level_cache.persist_policy import PERSIST_ALL, PersistRules
from serve.multi_level_cache.persistence import Persister
from serve.multi_level_cache.promotion import Promoter
from serve.multi_level_cache.request_names import NameResolver, NameSource, RequestNames, WantedObject
from serve.multi_level_cache.resync import Resync as ResyncState
from serve.multi_level_cache.secondary_tier import SecondaryTier
from serve.types import AcquireOutcome, JobId, JobResult, PageContent

NO_EPOCH = 0  # epochs count from 1
_KILL_POINTS: dict[type[Message], str] = {Claim: "claim", Acquire: "acquire", Begin: "begin", JobAnswer: "answer"}


class Post(Protocol):
    """Where answers go. Neither method blocks; what cannot be delivered is lost, and its reader's deadline passes."""

    def to_router(self, epoch: int, message: Message) -> None:
        """To the router of an engine group."""

    def to_worker(self, epoch: int, rank: int, message: Message) -> None:
        """To one worker of an engine group."""


class CacheManager:
    """Handlers of one node's cache manager. num_starts: from the arena; above 1 slots may be in use by older jobs.

    rules: which pages go down to `tier`. reach: told of each kill point that is passed.
    """

    def __init__(
        self,
        host: HostTier,
        names: NameSource,
        post: Post,
        num_starts: int = 1,
        tier: SecondaryTier | None = None,
        reach: Callable[[str], None] = lambda point: None,
        rules: PersistRules = PERSIST_ALL,
    ) -> None:
        self.host = host
        self._reach = reach
        self.tier = tier
        self.epoch = NO_EPOCH
        self._names = names
        self._resolver = NameResolver(host.formats, host.stats)
        self._post = post
        self._dead_epoch = NO_EPOCH
        self._bad_slots: dict[JobId, set[int]] = {}
        self._promoter = Promoter(host, tier) if tier is not None else None
        self._persister = Persister(host, tier, rules) if tier is not None else None
        self._claims = ClaimHandler(host, self._persister, reach)
        self._loads = LoadHandler(host, self._promoter, self._persister, self._send_acquire_reply)
        self.resync = ResyncState(host.pool, num_starts, is_needed=num_starts > 1)
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            Probe: self._probe,
            Acquire: self._acquire,
            Claim: self._claim,
            Begin: self._begin,
            Release: self._release,
            JobAnswer: self._job_answer,
            SlotsInUse: self._slots_in_use,
        }

    def handle(self, message: Message) -> None:
        """One message from the router or a worker."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self.host.stats.events["unknown_message"] += 1
            return
        point = _KILL_POINTS.get(type(message))
        if point is not None:
            self._reach(f"manager.before_{point}")
        handler(message)
        if point is not None:
            self._reach(f"manager.after_{point}")

    # --- the router asks -------------------------------------------------------------------------------------------

    def _probe(self, probe: Probe) -> None:
        self.host.stats.probes += 1
        names = self._names.read(probe.slot, probe.generation)
        if names is None:
            self.host.stats.events["stale_probe"] += 1
            return  # nobody waits for it
        found = names.names[: probe.num_pages]
        user = PageUser(probe.slot, probe.generation, names.num_prompt)
        host = {group: self._host_bitmap(group, found, user) for group in self.host.formats}
        disk = {group: self._lower_bitmap(group, found) for group in self.host.formats}
        self.host.directory.touch(found)
        speed = self._promoter.speed.bytes_per_s() if self._promoter is not None else 0.0
        self._post.to_router(self.epoch, ProbeReply(probe.probe_id, host, disk, speed))
        if self._promoter is not None:
            self._offer_probe(self._promoter, names, host, disk)

    @staticmethod
    def _offer_probe(promoter: Promoter, names: RequestNames, host: dict[str, bytes], disk: dict[str, bytes]) -> None:
        """The first object that only the lower tier has may serve to measure that tier by."""
        for group in disk:
            only = int.from_bytes(disk[group], "little") & ~int.from_bytes(host[group], "little")
            if only:
                index = (only & -only).bit_length() - 1
                parent = names.names[index - 1] if index else names.root
                promoter.offer_probe(WantedObject(0, index, PageKey(names.names[index], group), parent, names.root))
                return

    def _host_bitmap(self, group: str, names: list[bytes], user: PageUser) -> bytes:
        """Which pages are READY. A request that finds its prefix on the device asks for them in no other way."""
        found = [self.host.directory.find_ready(PageKey(name, group)) for name in names]
        present = [page is not None for page in found]
        for page in found:
            if page is not None and self._persister is not None:
                self._persister.wanted_by(page, user)
        self.host.stats.pages_probed[group] += len(names)
        self.host.stats.pages_hit[group] += sum(present)
        return as_bitmap(present)

    def _lower_bitmap(self, group: str, names: list[bytes]) -> bytes:
        if self.tier is None:
            return as_bitmap([False] * len(names))
        keys = [PageKey(name, group) for name in names]
        self.tier.touch(keys)
        return as_bitmap(self.tier.contains(keys))

    def _acquire(self, message: Acquire) -> None:
        if self._is_dead(message.job) or self.host.leases.is_known(message.job):
            return
        names = self._names.read(message.slot, message.generation)
        if names is None:
            self._send_acquire_reply(AcquireReply(message.job, AcquireOutcome.STALE))
            return
        if not self.resync.is_complete:
            self._send_acquire_reply(AcquireReply(message.job, AcquireOutcome.BUSY))
            return
        wanted = self._resolver.of_request(names, message.ranges, message.num_ranks)
        if not wanted:
            self._send_acquire_reply(AcquireReply(message.job, AcquireOutcome.MISSING, missing=message.ranges))
            return
        self._loads.acquire(message, wanted, _chain(names, wanted), names.num_prompt)

    def _claim(self, claim: Claim) -> None:
        if self._is_dead(claim.job) or self.host.leases.is_known(claim.job):
            return
        num_pages = sum(pages.count for pages in claim.ranges)
        reply = ClaimReply(claim.job, [], num_refused=num_pages)
        if self.resync.is_complete:
            wanted, chain = self._resolve_claim(claim)
            if wanted:
                reply = self._claims.grant(claim, wanted, chain)
        self._post.to_router(claim.job.epoch, reply)

    def _resolve_claim(self, claim: Claim) -> tuple[list[WantedObject], list[bytes]]:
        """What a claim wants, and the names of the prompt up to there as far as they are known."""
        if claim.names:
            wanted = self._resolver.of_claim(claim)
            return wanted, [each.key.name for each in wanted]
        names = self._names.read(claim.slot, claim.generation)
        if names is None:
            return [], []
        wanted = self._resolver.of_request(names, claim.ranges, claim.num_ranks)
        return wanted, _chain(names, wanted)

    # --- a lease's way ---------------------------------------------------------------------------------------------

    def _begin(self, message: Begin) -> None:
        outcome = self.host.leases.begin(message.job)
        if outcome is BeginOutcome.BEGUN:
            return
        self.host.stats.events[f"begin_{outcome.value}"] += 1
        if outcome is BeginOutcome.DUPLICATE or self._is_dead(message.job):
            return
        self._claims.guard_lapsed(message.job)
        self._post.to_router(message.job.epoch, LeaseLost(message.job))

    def _release(self, message: Release) -> None:
        lease = self.host.leases.get(message.job)
        if lease is None or lease.phase is LeasePhase.BEGUN:
            self.host.stats.events["release_ignored"] += 1
            return
        self._lapse(lease, DropReason.CLAIM_RELEASED)

    def _job_answer(self, answer: JobAnswer) -> None:
        if self.resync.job_ended(answer.job, answer.rank):
            return
        lease = self.host.leases.get(answer.job)
        outcome = self.host.leases.answer(answer.job, answer.rank, JobResult(answer.result))
        if outcome is AnswerOutcome.LATE:
            self._claims.guard_lapsed(answer.job)
        if outcome not in (AnswerOutcome.COUNTED, AnswerOutcome.LAST):
            self.host.stats.events[f"answer_{outcome.value}"] += 1
            return
        if answer.bad_slots:
            self._bad_slots.setdefault(answer.job, set()).update(answer.bad_slots)
        if outcome is AnswerOutcome.LAST and lease is not None:
            bad_slots = self._bad_slots.pop(answer.job, set())
            if lease.kind is LeaseKind.LOAD:
                self._loads.complete(lease, bad_slots)
            else:
                self._claims.complete(lease)

    def _lapse(self, lease: Lease, reason: DropReason) -> None:
        if lease.kind is LeaseKind.LOAD:
            self._loads.lapse(lease)
        else:
            self.host.leases.lapse(lease)
            self._claims.abandon(lease, reason)

    def _send_acquire_reply(self, reply: AcquireReply) -> None:
        self._post.to_router(reply.job.epoch, reply)

    # --- engine groups ---------------------------------------------------------------------------------------------

    def engine_up(self, epoch: int, num_ranks: int) -> None:
        """An engine group answers."""
        self.epoch = max(self.epoch, epoch)
        for rank in self.resync.engine_up(epoch, num_ranks):
            self._post.to_worker(epoch, rank, Resync(self.resync.nonce))

    def engine_down(self, epoch: int) -> None:
        """The engine groups up to `epoch` are reaped: all their jobs have ended."""
        self._dead_epoch = max(self._dead_epoch, epoch)
        leases, lapsed = self.host.leases.end_epoch(epoch)
        for lease in leases:
            self._bad_slots.pop(lease.job, None)
            if lease.kind is LeaseKind.LOAD:
                self._loads.forget(lease)
            else:
                self._claims.abandon(lease, DropReason.ENGINE_DOWN)
        for job in lapsed:
            self.host.pool.unblock(job)
        self.resync.engine_down(epoch)

    def _slots_in_use(self, answer: SlotsInUse) -> None:
        if not self.resync.slots_in_use(answer):
            self.host.stats.events["resync_ignored"] += 1

    def _is_dead(self, job: JobId) -> bool:
        """A message of an engine group that is gone; it waited in the mailbox."""
        if job.epoch > self._dead_epoch:
            return False
        self.host.stats.events["dead_epoch"] += 1
        return True

    # --- time, memory, lower tier ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let leases lapse whose deadline has passed, and go on persisting."""
        for lease in self.host.leases.expired():
            self.host.stats.events[f"{lease.kind.value}_lease_expired"] += 1
            self._lapse(lease, DropReason.CLAIM_EXPIRED)
        if self.tier is not None:
            self.tier.tick()
        self.poll_tier()
        if self._promoter is not None and self.resync.is_complete:
            self._promoter.probe()

    def poll_tier(self) -> None:
        """Take the lower tier's results, and give it what it has room for."""
        if self.tier is None or self._promoter is None or self._persister is None:
            return
        for result in self.tier.poll_finished():
            if self._promoter.owns(result.ticket):
                self._loads.complete_promotion(self._promoter.complete(result))
            elif self._persister.owns(result.ticket):
                self._persister.complete(result)
            else:
                self.host.stats.events["unknown_ticket"] += 1
        for key in self.tier.poll_evicted():
            self._persister.forget(key)
        self._persister.offer_next_victims()
        self._persister.submit_some()

    def grow(self, growth: Growth) -> None:
        """More of the arena has memory."""
        self.host.pool.grow(growth.backed_bytes // self.host.arena.shape.slot_bytes)

    def flush(self, root: bytes | None = None) -> int:
        """Drop all pages, or those under a root, in every tier; held ones when their holders end. Returns how many."""
        num_dropped = 0
        for node in [node for node in self.host.directory.nodes() if root is None or node.root == root]:
            for page in list(node.objects.values()):
                self.host.directory.drop(page, DropReason.FLUSHED)
                num_dropped += 1
        if self.tier is not None:
            self.tier.evict_root(root)
        return num_dropped

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest, on the clock of the host tier."""
        return self.host.leases.next_deadline()

    def check_integrity(self) -> list[str]:
        """What is wrong with the directory, the arena's headers and the leases; empty when all is well."""
        problems = self.host.directory.check_integrity()
        pins = {(id(page), holder) for page, holder in self.host.directory.holders() if isinstance(holder, JobId)}
        held = {(id(page), each.job) for each in self.host.leases if each.kind is LeaseKind.LOAD for page in each.pages}
        if pins != held:
            problems.append(f"{len(pins)} pins of jobs, {len(held)} pages of load leases")
        claimed = {id(page) for each in self.host.leases if each.kind is LeaseKind.STORE for page in each.pages}
        claimed |= {id(page) for page in self._promoter.holding()} if self._promoter is not None else set()
        filling = {id(page) for page in self.host.directory.pages() if page.content is PageContent.FILLING}
        if filling != claimed:
            problems.append(f"{len(filling)} pages FILLING, {len(claimed)} pages of claims and promotions")
        if self.tier is not None:
            problems += [f"{self.tier.name}: {problem}" for problem in self.tier.check_integrity()]
        return problems


def as_bitmap(present: list[bool]) -> bytes:
    """Bit i % 8 of byte i // 8 is entry i."""
    return np.packbits(np.asarray(present, dtype=bool), bitorder="little").tobytes()


def _chain(names: RequestNames, wanted: list[WantedObject]) -> list[bytes]:
    """Names from the first page of the request to the last one wanted."""
    return names.names[: max((each.page_index for each in wanted), default=-1) + 1]
