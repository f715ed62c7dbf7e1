"""A staging engine over a real arena in one process, with the manager's and the router's parts played by hand."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, StateLayout, rank_extents
from serve.ipc.messages import CancelJob, LoadPages, StorePages
from serve.model_infer.staging import StagingEngine, StagingParts
from serve.model_infer.staging_setup import make_parts, rank_pages
from serve.multi_level_cache.fault_injector import FaultInjector, parse_faults
from serve.multi_level_cache.host_arena import ArenaHeaders, ArenaShape, HostArena, arena_shape
from serve.multi_level_cache.object_format import object_formats
from serve.types import JobId, JobResult

DEADLINE_S = 10.0
EPOCH = 1


def make_layout(num_kv_heads: int = 3, page_size: int = 4, num_layers: int = 2, head_dim: int = 16) -> StateLayout:
    leaf = Leaf("kv", tuple(range(num_layers)), (2, head_dim), "float32", ShardKind.HEAD, num_kv_heads)
    return StateLayout(page_size, (StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, page_size, (leaf,)),))


@dataclass
class FakeAnswerer:
    """Keeps what was answered."""

    answers: list[tuple[JobId, JobResult, str, list[int]]] = field(default_factory=list)
    told: list[tuple[int, list[JobId], list[int]]] = field(default_factory=list)

    def answer(self, job: JobId, result: JobResult, detail: str = "", bad_slots: object = ()) -> None:
        self.answers.append((job, result, detail, list(bad_slots)))  # type: ignore[call-overload]

    def tell_slots(self, nonce: int, jobs: list[JobId], slots: list[int]) -> None:
        self.told.append((nonce, list(jobs), list(slots)))


def random_pool(num_pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)


class Rank:
    """One rank's pool and staging engine over a shared arena. Page contents are random bytes."""

    def __init__(
        self,
        arena: HostArena,
        layout: StateLayout,
        tp: int = 1,
        rank: int = 0,
        num_pages: int = 32,
        faults: str = "",
        is_sync: bool = False,
        **changes: object,
    ) -> None:
        self.arena, self.layout = arena, layout
        (group,) = layout.groups
        page_bytes = sum(extent.length for extent in rank_extents(group, tp, rank, loading=True))
        self.pool = random_pool(num_pages, page_bytes, seed=rank)
        self.injector = FaultInjector(parse_faults(faults)) if faults else None
        groups = rank_pages(layout, {"full": self.pool}, arena.shape.slot_bytes, tp, rank)
        parts = make_parts(arena, groups, self.injector, is_sync)
        self.parts = StagingParts(**{**parts.__dict__, **changes})  # type: ignore[arg-type]
        self.answerer = FakeAnswerer()
        self.engine = StagingEngine(self.parts, self.answerer)  # type: ignore[arg-type]
        self.counter = 0

    def job(self) -> JobId:
        self.counter += 1
        return JobId(EPOCH, self.counter)

    def send_store(
        self, pages: list[int], slots: list[int], generations: list[int] | None = None, after_step: int = -1
    ) -> JobId:
        job = self.job()
        self.engine.submit(StorePages(job, "full", pages, slots, self._generations(slots, generations), after_step))
        return job

    def send_load(self, pages: list[int], slots: list[int], generations: list[int] | None = None) -> JobId:
        job = self.job()
        self.engine.submit(LoadPages(job, "full", pages, slots, self._generations(slots, generations), 0, 99))
        return job

    def _generations(self, slots: list[int], given: list[int] | None) -> list[int]:
        return self.arena.generation[slots].tolist() if given is None else given

    def cancel(self, job: JobId) -> None:
        self.engine.cancel(CancelJob(job))

    def has_answered(self, job: JobId) -> bool:
        return any(answer[0] == job for answer in self.answerer.answers)

    def answer_of(self, job: JobId) -> tuple[JobResult, str, list[int]]:
        """The one answer of a job; waits for it."""
        self.wait_answers(job)
        ((_, *answer),) = [each for each in self.answerer.answers if each[0] == job]
        return tuple(answer)  # type: ignore[return-value]

    def result(self, job: JobId) -> JobResult:
        return self.answer_of(job)[0]

    def wait_answers(self, *jobs: JobId) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all(map(self.has_answered, jobs)):
            assert time.monotonic() < deadline, f"no answer to {jobs}"
            self.engine.poll_finished()
            time.sleep(0.001)

    def store(self, pages: list[int], slots: list[int], **more: object) -> JobResult:
        return self.result(self.send_store(pages, slots, **more))  # type: ignore[arg-type]

    def load(self, pages: list[int], slots: list[int], **more: object) -> JobResult:
        return self.result(self.send_load(pages, slots, **more))  # type: ignore[arg-type]


class Bench:
    """An arena whose slots are assigned to names as the cache manager does it, and the ranks over it."""

    def __init__(self, layout: StateLayout | None = None, num_slots: int = 32, slot_bytes: int | None = None) -> None:
        self.layout = layout or make_layout()
        formats = object_formats(self.layout)
        shape = arena_shape(formats, 1 << 24)
        self.arena = HostArena.create(ArenaShape(num_slots, slot_bytes or shape.slot_bytes, shape.num_units))
        self.num_starts = self.arena.begin_management()
        self.headers = ArenaHeaders(self.arena, self.num_starts)
        self.ranks: list[Rank] = []

    def rank(self, **options: object) -> Rank:
        self.ranks.append(Rank(self.arena, self.layout, **options))  # type: ignore[arg-type]
        return self.ranks[-1]

    def assign(self, *slots: int, name: bytes = b"") -> list[int]:
        """Give slots to a page each (of one slot); returns their generations."""
        return [self.headers.assign([slot], name or (slot + 1).to_bytes(2, "big") * 16)[0] for slot in slots]

    def close(self) -> None:
        for rank in self.ranks:
            rank.engine.close()
            assert rank.engine._wakeup._fd == -1, "all threads have ended"


def as_objects(pool: torch.Tensor) -> np.ndarray:
    return pool.numpy()
