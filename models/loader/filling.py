"""Fills the tensors of a plan from a checkpoint, piece by piece, in the threads of a pool."""

from concurrent.futures import Executor, Future, as_completed

import torch

from models.source import Progress
from models.weight_plan import Piece, WeightPlan, WeightReader


class WeightFilling:
    """Starts at once: allocates all tensors of `plan` on `device` and submits a task a piece to `executor`."""

    def __init__(
        self, plan: WeightPlan, reader: WeightReader, executor: Executor, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._weights = {key: torch.empty(shape, dtype=dtype, device=device) for key, shape in plan.shapes.items()}
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


def _fill(reader: WeightReader, piece: Piece, view: torch.Tensor) -> int:
    """Read one piece into its place, through host memory if that is elsewhere; returns its bytes."""
    if view.device.type == "cpu":
        reader.read(piece, view)
    else:
        staged = torch.empty(piece.local_shape, dtype=view.dtype)
        reader.read(piece, staged)
        view.copy_(staged)
    return view.nbytes
