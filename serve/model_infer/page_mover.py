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

from serve.model_infer.copy_engine import Batch, Bytes, CopyEngine
from serve.model_infer.host_pages import RankPages
from serve.model_infer.page_runs import PageObject
from serve.model_infer.transfer import Outcome, Transfer
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
        for objects in transfer.batches(self.engine.batch_bytes):
            bad_slots += self._move(transfer, objects)
            if transfer.is_cancelled:
                return Outcome(JobResult.CANCELLED, bad_slots=tuple(bad_slots), num_bytes=num_bytes)
            num_bytes += transfer.share.num_bytes * len(objects)
        if bad_slots:
            detail = f"{len(bad_slots)} of {len(transfer.objects)} pages do not match their checksums"
            return Outcome(JobResult.FAILED, detail, tuple(bad_slots), num_bytes)
        return Outcome(JobResult.DONE, num_bytes=num_bytes)

    def _move(self, transfer: Transfer, objects: list[PageObject]) -> list[int]:
        """Move one batch; returns the first slots of objects whose bytes are not right. Raises StaleSlotError."""
        self._check_generations(objects)
        faults = self._suffer_faults(objects)
        pages = transfer.pages
        seeds = self._seeds(pages, objects)
        batch = Batch(pages.pool, self._arena.payload, objects, faults.copied, transfer.share, seeds, transfer.stop)
        self._reach("before")
        bad_slots = self._move_batch(batch, faults)
        self._reach("after")
        return bad_slots

    def _reach(self, when: str) -> None:
        if self._injector is not None:
            self._injector.reach(f"worker.{when}_{self.site.removeprefix('host.')}")

    @abstractmethod
    def _move_batch(self, batch: Batch, faults: "Faults") -> list[int]:
        """Copy a batch and see to its checksums. What it does to a batch that was stopped does not matter."""

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


class PageStorer(PageMover):
    """Device to host. A page is complete, and nobody writes it while the job lasts."""

    site = "host.copy_out"

    def _move_batch(self, batch: Batch, faults: Faults) -> list[int]:
        sums = self.engine.move_out(batch)
        self.engine.finish()
        for each in faults.flipped:
            self._flip(batch, each)
        self._check_generations(batch.objects)
        if not batch.stop[0]:
            first_slots = np.array([each.slots[0] for each in batch.objects])
            for part in sums:
                self._arena.checksum[first_slots[part.rows], part.columns] = part.read()
        return []

    def _flip(self, batch: Batch, damaged: PageObject) -> None:
        for piece in batch.share.pieces[:1]:
            slot = damaged.slots[piece.slot_index]
            self._flip_bit(batch.host[slot, piece.slot_offset : piece.slot_offset + piece.length])


class PageLoader(PageMover):
    """Host to device. Nobody reads the device pages before the job is DONE."""

    site = "host.copy_in"

    def _move_batch(self, batch: Batch, faults: Faults) -> list[int]:
        first_slots = np.array([each.slots[0] for each in batch.objects])
        expected = self._arena.checksum[first_slots]
        sums = self.engine.move_in(batch)
        if faults.flipped:
            self.engine.finish()
            for each in faults.flipped:
                self._flip(batch, each)
            sums = self.engine.sum_pages(batch)
        self.engine.finish()
        self._check_generations(batch.objects)
        is_right = np.ones(len(batch.objects), dtype=bool)
        for part in sums:
            is_right[part.rows] &= (part.read() == expected[part.rows, part.columns]).all(axis=1)
        bad_slots: list[int] = first_slots[~is_right].tolist()
        return bad_slots if not batch.stop[0] else []

    def _flip(self, batch: Batch, damaged: PageObject) -> None:
        page = batch.pool[damaged.page]
        data = page.cpu()
        self._flip_bit(data.numpy())
        page.copy_(data)
