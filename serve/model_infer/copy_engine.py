"""How bytes move between a device pool and host slots, and how they are summed on the device: one engine a stream."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.checksum import page_checksums
from serve.model_infer.host_pages import Piece, Share, UnitRun
from serve.model_infer.page_runs import PageObject, PageRun, page_runs

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Fence = Any
"""A point in the compute stream: None on a CPU, where compute has ended when it returns."""


@dataclass(frozen=True)
class Batch:
    """Pages of one job that move together.

    pool: uint8 [num_pages, page_bytes]. host: uint8 [num_slots, slot_bytes]. objects: what is summed; copied: those
    whose bytes move too, which is all of them unless a fault is injected. share: the part of each page. seeds: uint64
    [objects, units]. stop: uint8 [1]; an engine may leave the rest of the batch undone once it is not 0.
    """

    pool: torch.Tensor
    host: Bytes
    objects: list[PageObject]
    copied: list[PageObject]
    share: Share
    seeds: Words
    stop: Bytes


@dataclass(frozen=True)
class PartSums:
    """Checksums int64 of the objects `rows` of a batch and their units `columns`, maybe still being made."""

    rows: slice
    columns: slice
    sums: torch.Tensor

    def read(self) -> Words:
        """[objects, units]."""
        words: Words = self.sums.cpu().numpy().view(np.uint64)
        return words


class CopyEngine(ABC):
    """Work of one stream. `make_fence` is called on the thread of page jobs, everything else on the stream's own.

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
    def move_out(self, batch: Batch) -> list[PartSums]:
        """Sum pages of the device, then copy them out. The sums are there after `finish`."""

    @abstractmethod
    def move_in(self, batch: Batch) -> list[PartSums]:
        """Copy pages in, then sum what is on the device. The sums are there after `finish`."""

    @abstractmethod
    def finish(self) -> None:
        """Block until everything queued has been done."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the engine holds, on any thread; nothing is queued any more."""

    def context(self) -> AbstractContextManager[Any]:
        """Surrounds the other calls: makes this engine's stream the current one."""
        return nullcontext()

    def sum_pages(self, batch: Batch) -> list[PartSums]:
        """Sum what is on the device now."""
        return [
            PartSums(
                slice(first, first + run.count),
                slice(units.first, units.first + units.count),
                _sum_run(batch, first, run, units),
            )
            for first, run in page_runs(batch.objects)
            for units in batch.share.units
        ]


def _sum_run(batch: Batch, first: int, run: PageRun, units: UnitRun) -> torch.Tensor:
    """int64 [count, units], on the device."""
    end = units.page_offset + units.count * units.unit_bytes
    part = batch.pool[run.first_page : run.first_page + run.count, units.page_offset : end]
    seeds = batch.seeds[first : first + run.count, units.first : units.first + units.count]
    signed = torch.from_numpy(np.ascontiguousarray(seeds).view(np.int64)).to(batch.pool.device)
    return page_checksums(part.view(run.count, units.count, units.unit_bytes), signed)


def page_part(pool: torch.Tensor, run: PageRun, piece: Piece) -> torch.Tensor:
    """uint8 [count, length]: a piece of each page of the run."""
    return pool[run.first_page : run.first_page + run.count, piece.page_offset : piece.page_offset + piece.length]


def slot_part(host: Bytes, run: PageRun, piece: Piece) -> Bytes:
    """uint8 [count, length]: a piece of each object of the run."""
    first, step = run.slots[piece.slot_index], len(run.slots)
    rows = slice(first, first + (run.count - 1) * step + 1, step)
    return host[rows, piece.slot_offset : piece.slot_offset + piece.length]
