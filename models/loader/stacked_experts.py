"""Checkpoints that keep all experts of a layer in one tensor, read as if each expert had its own."""

import re
from dataclasses import dataclass

import torch

from models.loader.safetensors import SafetensorsReader
from models.weight_plan import Piece, WeightReader

_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class _Part:
    """Rows [first, first + rows) of expert `index` in tensor `stack`."""

    stack: str
    index: int
    first: int
    rows: int


class StackedExpertsReader(WeightReader):
    """Gives `PREFIX.experts.E.{gate,up,down}_proj.weight` out of `PREFIX.experts.gate_up_proj` [E, 2I, H], whose first
    rows are the gate's, and `PREFIX.experts.down_proj` [E, H, I]. All other tensors are those of `reader`."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self._reader = reader
        self._parts: dict[str, _Part] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in reader.shapes().items():
            found = _STACK.match(name)
            if found is None or len(shape) != 3:
                self._shapes[name] = shape
                continue
            names = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
            rows = shape[1] // len(names)
            for expert in range(shape[0]):
                for place, kind in enumerate(names):
                    own = f"{found[1]}.{expert}.{kind}.weight"
                    self._parts[own] = _Part(name, expert, place * rows, rows)
                    self._shapes[own] = (rows, shape[2])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, piece: Piece, out: torch.Tensor) -> None:
        part = self._parts.get(piece.name)
        if part is None:
            self._reader.read(piece, out)
            return
        matrix = self._reader.raw(part.stack, part.index)[part.first : part.first + part.rows]
        out.copy_(matrix.narrow(piece.dim, piece.start, piece.stop - piece.start))
