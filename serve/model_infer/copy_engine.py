"""How bytes move between a device pool and host slots, and how they are summed on the device: one engine a stream."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.checksum import page_checksums
from serve.model_infer.host_pages import Piece, UnitRun

Bytes = npt.NDArray[np.uint8]
Fence = Any
"""A point in the compute stream: None on a CPU, where compute has ended when it returns."""


@dataclass(frozen=True)
class PageRun:
    """Objects whose device pages follow each other, and so do their host slots.

    Object i has page `first_page + i`; its j-th slot is `slots[j] + i * len(slots)`.
    """

    first_page: int
    slots: tuple[int, ...]
    count: int


class CopyEngine(ABC):
    """Work of one stream. `make_fence` is called on the compute thread, everything else on the stream's own thread.

    The caller guarantees that all other calls are inside `context()`, and that no byte named is changed by anybody
    until `finish` has returned. Work may be queued by a call and is done when `finish` returns. An implementation must
    do it in the order of the calls.

    batch_bytes: what to give between two calls of `finish`, so that a cancelled job ends soon.
    """

    batch_bytes: int

    @abstractmethod
    def make_fence(self) -> Fence:
        """Compute that has been launched so far."""

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """What is queued from here on begins when the compute before `fence` has ended."""

    @abstractmethod
    def copy_in(self, pool: torch.Tensor, host: Bytes, run: PageRun, pieces: Sequence[Piece]) -> None:
        """Host slots uint8 [num_slots, slot_bytes] to device pages uint8 [num_pages, page_bytes]."""

    @abstractmethod
    def copy_out(self, pool: torch.Tensor, host: Bytes, run: PageRun, pieces: Sequence[Piece]) -> None:
        """Device pages to host slots."""

    @abstractmethod
    def finish(self) -> None:
        """Block until everything queued has been done."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the engine holds, on any thread; nothing is queued any more."""

    def context(self) -> AbstractContextManager[Any]:
        """Surrounds the other calls: makes this engine's stream the current one."""
        return nullcontext()

    def turn(self) -> AbstractContextManager[Any]:
        """Surrounds one batch: where streams share a resource, one of them works at a time."""
        return nullcontext()

    def checksums(
        self, pool: torch.Tensor, run: PageRun, units: UnitRun, seeds: npt.NDArray[np.uint64]
    ) -> torch.Tensor:
        """Checksums int64 [count, units] of units of a run's device pages, on the device. seeds: [count, units]."""
        end = units.page_offset + units.count * units.unit_bytes
        part = pool[run.first_page : run.first_page + run.count, units.page_offset : end]
        signed = torch.from_numpy(np.ascontiguousarray(seeds).view(np.int64)).to(pool.device)
        return page_checksums(part.view(run.count, units.count, units.unit_bytes), signed)


class OneCore:
    """Lets one stream work at a time, loads before stores: copies take one core from compute at most."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._is_taken = False
        self._num_urgent = 0

    @contextmanager
    def turn(self, is_urgent: bool) -> Iterator[None]:
        """Blocks until it is the caller's turn; who is urgent goes first."""
        self._enter(is_urgent)
        try:
            yield
        finally:
            with self._free:
                self._is_taken = False
                self._free.notify_all()

    def _enter(self, is_urgent: bool) -> None:
        with self._free:
            self._num_urgent += is_urgent
            self._free.wait_for(lambda: not self._is_taken and (is_urgent or not self._num_urgent))
            self._num_urgent -= is_urgent
            self._is_taken = True


class CpuCopyEngine(CopyEngine):
    """memcpy on the calling thread, without the GIL. Batches are small enough to be summed while in the cache."""

    batch_bytes = 8 << 20

    def __init__(self, core: OneCore, is_urgent: bool) -> None:
        self._core = core
        self._is_urgent = is_urgent

    def turn(self) -> AbstractContextManager[Any]:
        return self._core.turn(self._is_urgent)

    def make_fence(self) -> Fence:
        return None

    def wait(self, fence: Fence) -> None:
        """Compute has ended when it returns."""

    def copy_in(self, pool: torch.Tensor, host: Bytes, run: PageRun, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            np.copyto(page_part(pool, run, piece).numpy(), slot_part(host, run, piece))

    def copy_out(self, pool: torch.Tensor, host: Bytes, run: PageRun, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            np.copyto(slot_part(host, run, piece), page_part(pool, run, piece).numpy())

    def finish(self) -> None:
        """Each call has done its work when it returned."""

    def close(self) -> None:
        """Nothing is held."""


def page_part(pool: torch.Tensor, run: PageRun, piece: Piece) -> torch.Tensor:
    """uint8 [count, length]: a piece of each page of the run."""
    return pool[run.first_page : run.first_page + run.count, piece.page_offset : piece.page_offset + piece.length]


def slot_part(host: Bytes, run: PageRun, piece: Piece) -> Bytes:
    """uint8 [count, length]: a piece of each object of the run."""
    first, step = run.slots[piece.slot_index], len(run.slots)
    rows = slice(first, first + (run.count - 1) * step + 1, step)
    return host[rows, piece.slot_offset : piece.slot_offset + piece.length]
