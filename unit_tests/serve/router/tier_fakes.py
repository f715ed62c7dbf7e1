"""A router over the product's own cache manager, with workers that copy token ids between pages and host slots.

Mailboxes are lists, so that a test decides what arrives when, and in which order.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from serve.ipc.messages import (
    CacheDown,
    CacheUp,
    CancelJob,
    JobAnswer,
    LoadPages,
    Message,
    Resync,
    SlotsInUse,
    StepPlan,
    StepResult,
    StorePages,
)
from serve.multi_level_cache.arena_growth import Growth
from serve.multi_level_cache.cache_manager import CacheManager
from serve.multi_level_cache.host_arena import ArenaShape, HostArena, manager_of
from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import DropReason
from serve.multi_level_cache.request_names import TableNames
from serve.multi_level_cache.secondary_tier import SecondaryTier
from serve.router.cache_client import CacheClient, ProbePolicy
from serve.types import JobId, JobResult
from unit_tests.serve.multi_level_cache.fake_tier import FakeTier
from unit_tests.serve.router.router_fakes import (
    EPOCH,
    OBJECT_BYTES,
    PAGE,
    PAGE_BYTES,
    Client,
    FakeWorker,
    Harness,
)

Job = LoadPages | StorePages
_PART = 800  # uint16 words of a rank in a slot


class TierWorker(FakeWorker):
    """Runs jobs when told. Each rank has a part of the first slot of an object, for the tokens that the page holds."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.jobs: deque[Job] = deque()
        self.last_step = -1
        self.nonce = 0

    def run_next(self) -> StepResult:
        result = super().run_next()
        self.last_step = result.step
        return result

    def can_run(self, job: Job) -> bool:
        return not isinstance(job, StorePages) or job.after_step <= self.last_step

    def copy(self, job: Job, arena: HostArena) -> JobAnswer:
        """Really copy, unless the generations say that the slots are another's."""
        if [int(arena.generation[slot]) for slot in job.slots] != job.generations:
            return JobAnswer(job.job, self.rank, JobResult.FAILED, "generation")
        size = len(job.slots) // len(job.pages)  # slots an object
        assert size == -(-OBJECT_BYTES.get(job.group, PAGE_BYTES) // PAGE_BYTES)
        for number, page in enumerate(job.pages):
            slots = job.slots[number * size : (number + 1) * size]
            views = [arena.payload[slot].view(np.uint16)[self.rank * _PART : (self.rank + 1) * _PART] for slot in slots]
            if isinstance(job, LoadPages):
                self._pages[job.group, page] = views[0][1 : 1 + int(views[0][0])].tolist()
                assert [int(view[0]) for view in views[1:]] == list(range(1, size)), "parts of several objects"
            else:
                assert manager_of(job.generations[0]) >= self.nonce
                content = self._pages[job.group, page]
                assert None not in content, "a page is stored before it is complete"
                views[0][: 1 + len(content)] = [len(content), *content]
                for number, view in enumerate(views[1:], 1):
                    view[0] = number
        return JobAnswer(job.job, self.rank, JobResult.DONE)


class _Post:
    """The manager's ways out."""

    def __init__(self, harness: "TierHarness") -> None:
        self._harness = harness

    def to_router(self, epoch: int, message: Message) -> None:
        assert epoch == EPOCH
        self._harness.to_router.append(message)

    def to_worker(self, epoch: int, rank: int, message: Message) -> None:
        assert isinstance(message, Resync)
        self._harness.resync(rank, message)


class TierHarness(Harness):
    """`to_manager`, `to_router` and the workers' jobs wait until they are delivered; `run` delivers all."""

    def __init__(
        self, num_slots: int = 64, tier: Callable[[HostArena], SecondaryTier] | None = None, **settings: object
    ) -> None:
        self.to_manager: deque[Message] = deque()
        self.to_router: deque[Message] = deque()
        self.sent_to_manager: list[Message] = []
        self.job_log: list[Message] = []
        self.manager: CacheManager | None = None
        self.arena = HostArena.create(ArenaShape(num_slots, PAGE_BYTES, 1))
        self.is_mailbox_full = False
        self._tier = tier
        super().__init__(**settings)
        self.workers = [TierWorker(rank, self.table, self.groups) for rank in range(self.settings.num_ranks)]
        self.start_manager()
        self.cache = CacheClient(self._send, ProbePolicy(deadline_s=0.05))
        self.router = self._make_router()
        self.engine_up()

    def _send(self, message: Message) -> bool:
        if self.is_mailbox_full:
            return False
        self.to_manager.append(message)
        self.sent_to_manager.append(message)
        return True

    # --- the manager and its surroundings ---

    def start_manager(self) -> None:
        sizes = [OBJECT_BYTES.get(group, PAGE_BYTES) for group in self.groups]
        formats = [
            ObjectFormat(group, index, PAGE, (size,))
            for index, (group, size) in enumerate(zip(self.groups, sizes, strict=True))
            if size
        ]
        num_starts = self.arena.begin_management()
        host = HostTier.build(self.arena, formats, num_starts, self.clock)
        names = TableNames(self.table, self.table.shape.num_slots)
        lower = self._tier(self.arena) if self._tier is not None else None
        self.manager = CacheManager(host, names, _Post(self), num_starts, lower)
        self.manager.grow(Growth(self.arena.shape.payload_bytes, True))
        self.manager.engine_up(EPOCH, self.settings.num_ranks)

    def kill_manager(self) -> None:
        self.manager = None
        self.router.turn([CacheDown()])

    def restart_manager(self) -> None:
        self.start_manager()
        self.router.turn([CacheUp(1)])

    def resync(self, rank: int, message: Resync) -> None:
        worker = self.workers[rank]
        worker.nonce = message.nonce
        for job in [job for job in worker.jobs if isinstance(job, StorePages)]:
            if any(manager_of(generation) < message.nonce for generation in job.generations):
                self.answer(rank, job, JobResult.FAILED)
        slots = [slot for job in worker.jobs for slot in job.slots]
        self.to_manager.append(SlotsInUse(message.nonce, rank, [job.job for job in worker.jobs], slots))

    def to_workers(self, message: Message) -> None:
        if isinstance(message, StepPlan):
            super().to_workers(message)
            return
        self.job_log.append(message)
        for worker in self.workers:
            if isinstance(message, CancelJob):
                for job in [job for job in worker.jobs if job.job == message.job]:
                    self.answer(worker.rank, job, JobResult.CANCELLED)
            elif isinstance(message, StorePages) and any(manager_of(g) < worker.nonce for g in message.generations):
                self._post(JobAnswer(message.job, worker.rank, JobResult.FAILED))
            else:
                worker.jobs.append(message)

    def answer(self, rank: int, job: Job, result: JobResult = JobResult.DONE) -> None:
        """A rank ends a job: it copies, or fails in one of the ways."""
        worker = self.workers[rank]
        worker.jobs.remove(job)
        answer = JobAnswer(job.job, rank, result)
        if result is JobResult.DONE:
            answer = worker.copy(job, self.arena)
        self._post(answer)

    def _post(self, answer: JobAnswer) -> None:
        self.to_router.append(answer)
        self.to_manager.append(answer)

    # --- delivery ---

    def deliver_to_manager(self) -> None:
        """The manager reads its mail; without a manager it stays where it is."""
        if self.manager is None:
            return
        while self.to_manager:
            self.manager.handle(self.to_manager.popleft())
        self.manager.tick()

    def finish_transfers(self) -> None:
        """The lower tier ends what it has been given, and the manager hears of it."""
        if self.manager is not None and isinstance(self.manager.tier, FakeTier):
            self.manager.tier.finish()
            self.manager.poll_tier()

    def deliver_to_router(self) -> None:
        messages = list(self.to_router)
        self.to_router.clear()
        self.router.turn(messages)

    def run_jobs(self) -> None:
        for worker in self.workers:
            for job in [job for job in worker.jobs if worker.can_run(job)]:
                self.answer(worker.rank, job)

    def deliver(self) -> None:
        """Everything that is under way arrives, and jobs run, until nothing moves."""
        while self._is_moving():
            self.deliver_to_manager()
            self.finish_transfers()
            self.run_jobs()
            self.deliver_to_router()

    def _is_moving(self) -> bool:
        mail = len(self.to_router) + (len(self.to_manager) if self.manager is not None else 0)
        return bool(mail) or any(worker.can_run(job) for worker in self.workers for job in worker.jobs)

    def settle(self) -> None:
        """Whatever still waits has a deadline: let them all pass."""
        self.is_mailbox_full = False
        if self.manager is None:
            self.restart_manager()
        for _ in range(20):
            self.run()
            self.clock.advance(1.0)
            self.manager.tick()
            self.router.turn([])
            if not self.router.requests and not len(self.tiers.write_back) and not len(self.manager.host.leases):
                return

    def run(self, max_steps: int = 3000) -> None:
        """Until nothing is in flight anywhere."""
        for _ in range(max_steps):
            self.deliver()
            if not self.is_busy:
                return
            self.step_all()
        raise AssertionError("the router does not come to rest")

    # --- convenience ---

    def serve(self, prompt: list[int], **sampling: object) -> Client:
        """One request from its arrival to its end, checked."""
        client = self.submit(prompt, **sampling)
        self.run()
        self.check_tokens(client)
        return client

    def evict_device(self) -> None:
        """All that is idle on the device goes; the host keeps what it has."""
        for group in self.ledger.groups.values():
            group.flush()
        self.ledger.index_version += 1

    def num_ready(self) -> int:
        """Pages that the host has complete."""
        return sum(1 for page in self.manager.host.directory.pages() if page.content.value == "ready")

    def evict_host(self) -> None:
        """All that nobody uses goes from the host; a lower tier keeps what it has."""
        self.finish_transfers()
        directory = self.manager.host.directory
        for page in [page for page in directory.pages() if page.content.value == "ready" and not page.pins]:
            directory.drop(page, DropReason.EVICTED)

    @property
    def tiers(self):
        return self.router.engine.tiers

    def jobs_of(self, kind: type[Job]) -> list[Job]:
        return [message for message in self.job_log if isinstance(message, kind)]

    def check_idle(self) -> None:
        super().check_idle()
        assert len(self.tiers.jobs) == 0
        assert len(self.tiers.loader) == 0
        assert len(self.tiers.write_back) == 0
        assert not self.tiers.write_back._put_off
        assert not self.tiers.loader.coming
        assert not self.tiers.loader._orphans
        assert not self.tiers.loader._by_job
        assert self.ledger.num_jobs == 0
        if self.manager is not None:
            assert self.manager.check_integrity() == []
            assert self.manager.host.directory.slots_pinned == 0
            assert self.manager.host.directory.slots_filling == 0
            assert len(self.manager.host.leases) == 0

    def leases(self) -> list[JobId]:
        return [lease.job for lease in self.manager.host.leases]
