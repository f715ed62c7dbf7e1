"""Builders and fakes for the cache tiers' tests."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from serve.ipc.messages import (
    Acquire,
    AcquireReply,
    Begin,
    Claim,
    ClaimReply,
    JobAnswer,
    Message,
    PageRange,
    Probe,
    ProbeReply,
    Release,
)
from serve.multi_level_cache.arena_growth import Growth
from serve.multi_level_cache.cache_manager import CacheManager
from serve.multi_level_cache.host_arena import ArenaShape, HostArena
from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.persist_policy import PERSIST_ALL, PersistRules
from serve.multi_level_cache.request_names import RequestNames
from serve.multi_level_cache.secondary_tier import SecondaryTier
from serve.types import JobId, JobResult

SLOT_BYTES = 4096
FULL = ObjectFormat("full", 0, 64, (2048, 2048))
STATE = ObjectFormat("state", 1, 64, (5000, 5000))  # takes three slots
FORMATS = (FULL, STATE)


class FakeClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeNames:
    """Requests by slot; generation 1 unless told otherwise."""

    def __init__(self) -> None:
        self.requests: dict[tuple[int, int], RequestNames] = {}

    def read(self, slot: int, generation: int) -> RequestNames | None:
        return self.requests.get((slot, generation))

    def put(self, slot: int, names: RequestNames) -> None:
        self.requests[slot, 1] = names


@dataclass
class FakePost:
    """Keeps what was sent."""

    router: list[tuple[int, Message]] = field(default_factory=list)
    workers: list[tuple[int, int, Message]] = field(default_factory=list)

    def to_router(self, epoch: int, message: Message) -> None:
        self.router.append((epoch, message))

    def to_worker(self, epoch: int, rank: int, message: Message) -> None:
        self.workers.append((epoch, rank, message))

    def take(self) -> list[Message]:
        """Messages to the router since the last call."""
        messages, self.router = [message for _, message in self.router], []
        return messages


def page_name(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def request(root: object, *tokens: object) -> RequestNames:
    """Names of a prompt whose page i has content tokens[i]."""
    first = parent = page_name("root", root)
    names = []
    for token in tokens:
        parent = page_name(parent, token)
        names.append(parent)
    return RequestNames(first, names)


class Bench:
    """A cache manager over a small arena, with its surroundings faked. Its requests are one until `slot` changes."""

    def __init__(
        self,
        num_slots: int = 64,
        tier: SecondaryTier | None = None,
        arena: HostArena | None = None,
        clock: FakeClock | None = None,
        backed: bool = True,
        rules: PersistRules = PERSIST_ALL,
    ) -> None:
        num_units = max(len(entry.unit_bytes) for entry in FORMATS)
        self.arena = arena or HostArena.create(ArenaShape(num_slots, SLOT_BYTES, num_units))
        self.clock, self.names, self.post = clock or FakeClock(), FakeNames(), FakePost()
        num_starts = self.arena.begin_management()
        self.host = HostTier.build(self.arena, FORMATS, num_starts, self.clock)
        self.manager = CacheManager(self.host, self.names, self.post, num_starts, tier, rules=rules)
        self.tier = tier
        if backed:
            self.manager.grow(Growth(self.arena.shape.payload_bytes, True))
        self._counter = 0
        self.slot = 0  # of the request that asks next

    def job(self, epoch: int = 1) -> JobId:
        self._counter += 1
        return JobId(epoch, self._counter)

    def one_reply(self) -> Message:
        (message,) = self.post.take()
        return message

    def probe(self, names: RequestNames) -> ProbeReply:
        self.names.put(self.slot, names)
        self.manager.handle(Probe(7, self.slot, 1, len(names.names)))
        reply = self.one_reply()
        assert isinstance(reply, ProbeReply)
        return reply

    def present(self, names: RequestNames, group: str = "full", where: str = "host") -> list[bool]:
        bitmap = getattr(self.probe(names), where).get(group, b"")
        bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
        return [bool(bit) for bit in bits[: len(names.names)]]

    def claim(
        self, prompt: RequestNames, *ranges: PageRange, job: JobId | None = None, ranks: int = 1, **more: object
    ) -> ClaimReply:
        self.names.put(self.slot, prompt)
        job = job or self.job()
        wanted = list(ranges) or [PageRange("full", 0, len(prompt.names))]
        self.manager.handle(Claim(job, self.slot, 1, wanted, ranks, 10.0, **more))  # type: ignore[arg-type]
        reply = self.one_reply()
        assert isinstance(reply, ClaimReply)
        assert reply.job == job
        return reply

    def acquire_later(self, names: RequestNames, *ranges: PageRange, job: JobId | None = None, ranks: int = 1) -> JobId:
        self.names.put(self.slot, names)
        job = job or self.job()
        wanted = list(ranges) or [PageRange("full", 0, len(names.names))]
        self.manager.handle(Acquire(job, self.slot, 1, wanted, ranks, 10.0))
        return job

    def acquire(self, names: RequestNames, *ranges: PageRange, ranks: int = 1) -> AcquireReply:
        self.acquire_later(names, *ranges, ranks=ranks)
        reply = self.one_reply()
        assert isinstance(reply, AcquireReply)
        return reply

    def begin(self, job: JobId) -> None:
        self.manager.handle(Begin(job))

    def release(self, job: JobId) -> None:
        self.manager.handle(Release(job))

    def answer(self, job: JobId, rank: int = 0, result: JobResult = JobResult.DONE, **more: object) -> None:
        self.manager.handle(JobAnswer(job, rank, result, **more))  # type: ignore[arg-type]

    def store(self, names: RequestNames, *ranges: PageRange, **more: object) -> ClaimReply:
        """Claim, fill and publish; what does not fit is left out."""
        reply = self.claim(names, *ranges, **more)  # type: ignore[arg-type]
        self.finish_store(reply)
        return reply

    def finish_store(self, reply: ClaimReply) -> None:
        if reply.granted:
            self.begin(reply.job)
            self.answer(reply.job)

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.manager.tick()

    def assert_sound(self) -> None:
        assert self.manager.check_integrity() == []

    def assert_idle(self) -> None:
        """Nothing is held by anybody."""
        self.assert_sound()
        assert len(self.host.leases) == 0
        assert self.host.directory.slots_pinned == self.host.directory.slots_filling == self.host.pool.num_blocked == 0
