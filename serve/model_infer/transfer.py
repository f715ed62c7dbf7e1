"""One job on one rank: which pages go where, in batches, and what became of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from serve.ipc.messages import LoadPages, StorePages
from serve.model_infer.copy_engine import Fence
from serve.model_infer.host_pages import RankPages, Share
from serve.model_infer.page_runs import PageObject
from serve.multi_level_cache.host_arena import HostArena
from serve.types import JobId, JobResult


class Direction(Enum):
    """LOAD: host to device. STORE: device to host."""

    LOAD = "load"
    STORE = "store"


class BadJobError(Exception):
    """A job message that contradicts itself or this rank's memory; one line."""


@dataclass(frozen=True)
class Outcome:
    """What a job came to on this rank. num_bytes: copied; seconds: from its start on the stream to its end."""

    result: JobResult
    detail: str = ""
    bad_slots: tuple[int, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Transfer:
    """A job. The main thread makes it and may cancel it; the stream's thread looks at that between pages.

    fence: compute that must have ended before the copies begin; set before the transfer goes to its stream.
    stop: uint8 [1], not 0 once cancelled; a flag that code without the interpreter can read.
    """

    job: JobId
    direction: Direction
    pages: RankPages
    objects: list[PageObject]
    after_step: int | None = None
    fence: Fence = None
    stop: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1, dtype=np.uint8))

    def cancel(self) -> None:
        """Start no more pages."""
        self.stop[0] = 1

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return bool(self.stop[0])

    @property
    def share(self) -> Share:
        """The part of each object that moves."""
        return self.pages.loads if self.direction is Direction.LOAD else self.pages.stores

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank copies."""
        return self.share.num_bytes * len(self.objects)

    @property
    def slots(self) -> list[int]:
        """All host slots of the job."""
        return [slot for each in self.objects for slot in each.slots]

    def batches(self, num_bytes: int) -> Iterator[list[PageObject]]:
        """The objects in order, as many at a time as `num_bytes` holds, at least one."""
        size = max(1, num_bytes // max(1, self.share.num_bytes))
        for start in range(0, len(self.objects), size):
            yield self.objects[start : start + size]


def make_transfer(message: LoadPages | StorePages, groups: dict[str, RankPages], arena: HostArena) -> Transfer:
    """The job of a message. Raises BadJobError."""
    pages = groups.get(message.group)
    if pages is None:
        raise BadJobError(f"no state group {message.group!r}")
    wanted = len(message.pages) * pages.slots_per_object
    if not len(message.slots) == len(message.generations) == wanted:
        raise BadJobError(
            f"{len(message.pages)} pages take {wanted} slots, not {len(message.slots)} "
            f"with {len(message.generations)} generations"
        )
    if not _are_below(message.pages, pages.pool.shape[0]) or not _are_below(message.slots, arena.shape.num_slots):
        raise BadJobError("a page or a slot does not exist")
    objects = _objects(message, pages.slots_per_object)
    if isinstance(message, StorePages):
        return Transfer(message.job, Direction.STORE, pages, objects, message.after_step)
    if message.first_layer != 0 or message.last_layer < pages.num_layers:
        raise BadJobError(f"layers [{message.first_layer}, {message.last_layer}) only: a job moves whole pages")
    return Transfer(message.job, Direction.LOAD, pages, objects)


def _are_below(numbers: Sequence[int], limit: int) -> bool:
    return not numbers or (min(numbers) >= 0 and max(numbers) < limit)


def _objects(message: LoadPages | StorePages, step: int) -> list[PageObject]:
    return [
        PageObject(
            page,
            tuple(message.slots[index * step : (index + 1) * step]),
            tuple(message.generations[index * step : (index + 1) * step]),
        )
        for index, page in enumerate(message.pages)
    ]
