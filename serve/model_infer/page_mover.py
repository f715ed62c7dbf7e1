"""Moves the pages of one job between the pool and the host arena, and keeps the promises of the cache protocol.

Runs on the thread of one stream (or, with --cpu_cache_sync, on the main thread). Store: generation, checksum of the
device's bytes, copy out, generation, checksum into the header. Load: name and checksum from the header, copy in,
checksum of the device's bytes, generation. A generation is compared last on a load, because the manager bumps it
before it changes anything else: what was read before is then of one piece.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from serve.model_infer.copy_engine import Bytes, CopyEngine
from serve.model_infer.host_pages import RankPages, Share
from serve.model_infer.transfer import Outcome, PageObject, Transfer, page_runs
from serve.multi_level_cache.checksum import unit_seeds
from serve.multi_level_cache.fault_injector import FaultAction, FaultInjector
from serve.multi_level_cache.host_arena import HostArena
from serve.types import JobResult

Words = npt.NDArray[np.uint64]


class StaleSlotError(Exception):
    """A slot is no longer of the job's generation."""


class PageMover(ABC):
    """One direction. `run` never leaves a copy behind: what it queued has ended when it returns or raises."""

    site: str

    def __init__(self, arena: HostArena, engine: CopyEngine, injector: FaultInjector | None = None) -> None:
        self.engine = engine
        self._arena = arena
        self._injector = injector

    def run(self, transfer: Transfer) -> Outcome:
        """Move all pages. Raises what an engine or an injected fault raises."""
        begun = time.perf_counter()
        with self.engine.context():
            try:
                self.engine.wait(transfer.fence)
                outcome = self._run_batches(transfer)
            except StaleSlotError as error:
                outcome = Outcome(JobResult.FAILED, str(error))
            finally:
                self.engine.finish()
        return replace(outcome, seconds=time.perf_counter() - begun)

    def _run_batches(self, transfer: Transfer) -> Outcome:
        bad_slots: list[int] = []
        num_bytes = 0
        for batch in transfer.batches(self.engine.batch_bytes):
            if transfer.is_cancelled:
                return Outcome(JobResult.CANCELLED, bad_slots=tuple(bad_slots), num_bytes=num_bytes)
            bad_slots += self._move(transfer, batch)
            num_bytes += transfer.share.num_bytes * len(batch)
        if bad_slots:
            detail = f"{len(bad_slots)} of {len(transfer.objects)} pages do not match their checksums"
            return Outcome(JobResult.FAILED, detail, tuple(bad_slots), num_bytes)
        return Outcome(JobResult.DONE, num_bytes=num_bytes)

    def _move(self, transfer: Transfer, batch: list[PageObject]) -> list[int]:
        """Move one batch; returns the first slots of objects whose bytes are not right. Raises StaleSlotError."""
        self._check_generations(batch)
        faults = self._suffer_faults(batch)
        with self.engine.turn():
            return self._move_batch(transfer.pages, batch, faults)

    @abstractmethod
    def _move_batch(self, pages: RankPages, batch: list[PageObject], faults: "Faults") -> list[int]:
        """Copy a batch and see to its checksums."""

    def _check_generations(self, batch: Sequence[PageObject]) -> None:
        slots = [slot for each in batch for slot in each.slots]
        expected = [generation for each in batch for generation in each.generations]
        found = self._arena.generation[slots].tolist()
        if found != expected:
            slot = next(s for s, a, b in zip(slots, found, expected, strict=True) if a != b)
            raise StaleSlotError(f"host slot {slot} has been reused")

    def _seeds(self, pages: RankPages, batch: Sequence[PageObject]) -> Words:
        """Seeds [objects, units] by the names that the header has now."""
        names = [self._arena.name[each.slots[0]].tobytes() for each in batch]
        return unit_seeds(names, pages.format.group_index, pages.format.unit_bytes)

    def _sum(self, pages: RankPages, share: Share, batch: Sequence[PageObject], seeds: Words) -> list["PartSums"]:
        """Sums of the device's bytes; to be read after `finish`."""
        return [
            PartSums(
                slice(first, first + run.count),
                slice(units.first, units.first + units.count),
                self.engine.checksums(
                    pages.pool,
                    run,
                    units,
                    seeds[first : first + run.count, units.first : units.first + units.count],
                ),
            )
            for first, run in page_runs(batch)
            for units in share.units
        ]

    def _suffer_faults(self, batch: list[PageObject]) -> "Faults":
        """A fault on purpose may stop here, or raise, at each object."""
        if self._injector is None:
            return Faults(batch, [])
        copied, flipped = [], []
        for each in batch:
            rule = self._injector.decide(self.site)
            if rule is not None:
                self._injector.suffer(rule)
            if rule is None or rule.action is not FaultAction.DROP:
                copied.append(each)
            if rule is not None and rule.action is FaultAction.BITFLIP:
                flipped.append(each)
        return Faults(copied, flipped)

    def _flip_bit(self, data: Bytes) -> None:
        if self._injector is not None:
            self._injector.flip_bit(data)


@dataclass(frozen=True)
class Faults:
    """What of a batch is to be copied, and what of it is to be damaged behind the copy."""

    copied: list[PageObject]
    flipped: list[PageObject]


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


class PageStorer(PageMover):
    """Device to host. A page is complete, and nobody writes it while the job lasts."""

    site = "host.copy_out"

    def _move_batch(self, pages: RankPages, batch: list[PageObject], faults: Faults) -> list[int]:
        sums = self._sum(pages, pages.stores, batch, self._seeds(pages, batch))
        for _, run in page_runs(faults.copied):
            self.engine.copy_out(pages.pool, self._arena.payload, run, pages.stores.pieces)
        self.engine.finish()
        for each in faults.flipped:
            self._flip(pages, each)
        self._check_generations(batch)
        first_slots = np.array([each.slots[0] for each in batch])
        for part in sums:
            self._arena.checksum[first_slots[part.rows], part.columns] = part.read()
        return []

    def _flip(self, pages: RankPages, damaged: PageObject) -> None:
        for piece in pages.stores.pieces[:1]:
            slot = damaged.slots[piece.slot_index]
            self._flip_bit(self._arena.payload[slot, piece.slot_offset : piece.slot_offset + piece.length])


class PageLoader(PageMover):
    """Host to device. Nobody reads the device pages before the job is DONE."""

    site = "host.copy_in"

    def _move_batch(self, pages: RankPages, batch: list[PageObject], faults: Faults) -> list[int]:
        first_slots = np.array([each.slots[0] for each in batch])
        seeds, expected = self._seeds(pages, batch), self._arena.checksum[first_slots]
        for _, run in page_runs(faults.copied):
            self.engine.copy_in(pages.pool, self._arena.payload, run, pages.loads.pieces)
        for each in faults.flipped:
            self._flip(pages, each)
        sums = self._sum(pages, pages.loads, batch, seeds)
        self.engine.finish()
        self._check_generations(batch)
        is_right = np.ones(len(batch), dtype=bool)
        for part in sums:
            is_right[part.rows] &= (part.read() == expected[part.rows, part.columns]).all(axis=1)
        bad_slots: list[int] = first_slots[~is_right].tolist()
        return bad_slots

    def _flip(self, pages: RankPages, damaged: PageObject) -> None:
        page = pages.pool[damaged.page]
        data = page.cpu()
        self._flip_bit(data.numpy())
        page.copy_(data)
