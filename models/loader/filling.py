"""Fills the tensors of a plan from a checkpoint, piece by piece, in the threads of a pool."""

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future, as_completed

import torch

from models.source import Progress
from models.weight_plan import Piece, WeightPlan, WeightReader


class WeightFilling:
    """Starts at once: submits a task a piece of `plan` to `executor`. allocate: gives [n] values of the model dtype.

    All weights of the model dtype lie in one allocation, each at a multiple of 64 values, so that they share large
    memory pages. Those for which the plan has a dtype of their own are few and small.
    """

    def __init__(
        self, plan: WeightPlan, reader: WeightReader, executor: Executor, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        sizes = {key: math.prod(shape) for key, shape in plan.shapes.items() if key not in plan.dtypes}
        memory, start = allocate(sum(_aligned(size) for size in sizes.values())), 0
        self._weights: dict[str, torch.Tensor] = {}
        for key, size in sizes.items():
            self._weights[key] = memory[start : start + size].view(plan.shapes[key])
            start += _aligned(size)
        for key, dtype in plan.dtypes.items():
            self._weights[key] = torch.empty(plan.shapes[key], dtype=dtype, device=memory.device)
        self._futures: list[Future[int]] = [
            executor.submit(_fill, reader, piece, piece.view_of(self._weights[key]))
            for key, pieces in plan.pieces.items()
            for piece in pieces
        ]

    def result(self, progress: Progress | None = None) -> dict[str, torch.Tensor]:
        """The filled tensors by key; waits, reporting bytes as ("weights", done, total). Raises what a task raised."""
        total, done = sum(weight.nbytes for weight in self._weights.values()), 0
        for future in as_completed(self._futures):
            done += future.result()
            if progress is not None:
                progress("weights", done, total)
        return self._weights


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _fill(reader: WeightReader, piece: Piece, view: torch.Tensor) -> int:
    """Read one piece into its place, through host memory if that is elsewhere; returns its bytes."""
    if view.device.type == "cpu" or reader.writes_to_devices:
        _read(reader, piece, view)
    else:
        staged = torch.empty(piece.local_shape, dtype=view.dtype)
        _read(reader, piece, staged)
        view.copy_(staged)
    return view.nbytes


def _read(reader: WeightReader, piece: Piece, out: torch.Tensor) -> None:
    reader.read(piece, out)
    if piece.offset:
        out += piece.offset
