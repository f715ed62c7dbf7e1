"""Copies on a CPU: each batch is one call of compiled code, on a thread that computes nothing else."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kernels.checksum_weights import column_weights, num_rows, row_weights
from kernels.cpu.page_moves import move_pages
from serve.model_infer.copy_engine import Batch, CopyEngine, Fence, PartSums
from serve.model_infer.host_pages import Share

_WORD = 8

Numbers = npt.NDArray[np.int64]


class CpuCopyEngine(CopyEngine):
    """memcpy and checksum on the calling thread, without the GIL.

    A batch costs the thread the GIL once or twice, for which it may wait as long as a step. So a load, for which
    somebody waits, is one batch: `stop` is looked at between pages all the same.
    """

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._tables: dict[Share, tuple[Numbers, Numbers]] = {}

    def make_fence(self) -> Fence:
        return None

    def wait(self, fence: Fence) -> None:
        """Compute has ended when it returns."""

    def move_out(self, batch: Batch) -> list[PartSums]:
        return self._move(batch, is_store=True)

    def move_in(self, batch: Batch) -> list[PartSums]:
        return self._move(batch, is_store=False)

    def _move(self, batch: Batch, is_store: bool) -> list[PartSums]:
        pieces, units = self._table(batch.share)
        objects, pool = batch.objects, batch.pool.numpy()
        is_copied = np.ones(len(objects), dtype=np.uint8)
        if len(batch.copied) != len(objects):
            is_copied[:] = [each in batch.copied for each in objects]
        sums = np.zeros((len(objects), len(units)), dtype=np.uint64)
        move_pages(
            is_store,
            pool.view(np.uint64),
            pool.ctypes.data,
            batch.host.ctypes.data,
            batch.host.shape[1],
            np.array([each.page for each in objects], dtype=np.int64),
            np.array([each.slots for each in objects], dtype=np.int64),
            is_copied,
            pieces,
            units,
            *row_weights(num_rows(int(units[:, 1].max(initial=0)))),
            *column_weights(),
            sums,
            batch.stop,
        )
        return list(_parts(batch, sums))

    def _table(self, share: Share) -> tuple[Numbers, Numbers]:
        """The share's pieces and units as `move_pages` takes them."""
        if share not in self._tables:
            self._tables[share] = _pieces(share), _units(share)
        return self._tables[share]

    def finish(self) -> None:
        """Each call has done its work when it returned."""

    def close(self) -> None:
        """Nothing is held."""


def _pieces(share: Share) -> Numbers:
    rows = [(each.slot_index, each.slot_offset, each.page_offset, each.length) for each in share.pieces]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _units(share: Share) -> Numbers:
    """Raises ValueError for units that are not made of whole words."""
    rows = [(run.page_offset + at * run.unit_bytes, run.unit_bytes) for run in share.units for at in range(run.count)]
    units = np.array(rows, dtype=np.int64).reshape(-1, 2)
    if (units % _WORD).any():
        raise ValueError(f"extent units on a CPU are whole words of {_WORD} bytes, not {rows}")
    return units


def _parts(batch: Batch, sums: npt.NDArray[np.uint64]) -> Iterator[PartSums]:
    """By run of units, with their seeds."""
    done = 0
    for run in batch.share.units:
        columns = slice(run.first, run.first + run.count)
        total = sums[:, done : done + run.count] + batch.seeds[:, columns]
        done += run.count
        yield PartSums(slice(0, len(sums)), columns, torch.from_numpy(total.view(np.int64)))
