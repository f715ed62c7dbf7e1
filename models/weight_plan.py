"""What a rank's model needs from a checkpoint: its tensors, and which part of which checkpoint tensor fills them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from models.errors import ModelError, name_first


@dataclass(frozen=True)
class Piece:
    """Indexes [start, stop) along `dim` of checkpoint tensor `name`, whose whole shape is `shape`.

    It fills rows of the target from `row` on, within the target's leading index `expert` if that is not None; `offset`
    is added to what the checkpoint has. Names are those of transformers' checkpoints; readers of other formats
    translate.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    row: int = 0
    expert: int | None = None
    offset: float = 0.0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = list(self.shape)
        shape[self.dim] = self.stop - self.start
        return tuple(shape)

    def view_of(self, target: torch.Tensor) -> torch.Tensor:
        """The part of `target` that this piece fills."""
        if self.expert is not None:
            target = target[self.expert]
        return target.narrow(0, self.row, self.local_shape[0])


class WeightPlan:
    """The tensors of one rank by key, each with its shape and pieces, and its dtype where that is not the model's."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def add_whole(
        self, key: str, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, *, offset: float = 0.0
    ) -> None:
        """Tensor `name` as it is, plus `offset`."""
        self._add(key, shape, [Piece(name, shape, 0, 0, shape[0], offset=offset)], dtype)

    def add_rows(
        self,
        key: str,
        parts: list[tuple[str, int, int, int]],
        rest: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Row ranges stacked in order: (name, rows in the checkpoint, start, stop) each; `rest` is the other shape."""
        pieces, row = [], 0
        for name, total, start, stop in parts:
            pieces.append(Piece(name, (total, *rest), 0, start, stop, row))
            row += stop - start
        self._add(key, (row, *rest), pieces, dtype)

    def add_columns(self, key: str, name: str, shape: tuple[int, int], start: int, stop: int) -> None:
        """Columns [start, stop) of matrix `name` of `shape`."""
        self._add(key, (shape[0], stop - start), [Piece(name, shape, 1, start, stop)])

    def add_experts(self, key: str, shape: tuple[int, int, int], pieces: list[Piece]) -> None:
        """Matrices stacked along a leading dimension, filled by `pieces` that name their `expert`."""
        self._add(key, shape, pieces)

    def _add(self, key: str, shape: tuple[int, ...], pieces: list[Piece], dtype: torch.dtype | None = None) -> None:
        if dtype is not None:
            self.dtypes[key] = dtype
        self.shapes[key] = shape
        self.pieces[key] = pieces


class WeightReader(ABC):
    """A checkpoint, by the names of transformers. `read` is called from several threads.

    writes_to_devices: whether `read` can fill tensors that are not on the CPU.
    """

    writes_to_devices = False

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in the checkpoint, without those that every loader may ignore."""

    @abstractmethod
    def read(self, piece: Piece, out: torch.Tensor) -> None:
        """Write the part into `out` [*piece.local_shape] (on the CPU), converted to out's dtype."""


def check_names(plan: WeightPlan, shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise ModelError if tensors are missing, of the wrong shape, or not known to the model."""
    wanted = {piece.name: piece.shape for pieces in plan.pieces.values() for piece in pieces}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ModelError(f"{where}: {len(missing)} tensors are missing: {name_first(missing)}")
    wrong = [f"{n} is {list(shapes[n])}, not {list(wanted[n])}" for n in wanted if tuple(shapes[n]) != wanted[n]]
    if wrong:
        raise ModelError(f"{where}: tensors have the wrong shape: {name_first(wrong)}")
    unknown = sorted(name for name in shapes if name not in wanted)
    if unknown:
        raise ModelError(f"{where}: {len(unknown)} tensors are not part of this architecture: {name_first(unknown)}")
