"""Safetensors checkpoints, one file or sharded; only the asked-for part of a tensor is read."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models.errors import ModelError
from models.weight_plan import Piece, WeightReader

_FLOATS = {"F64", "F32", "F16", "BF16"}
_INTEGERS = {"I64", "I32"}
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def keep_name(name: str) -> str | None:
    """The rename of a checkpoint whose names are those of the plan."""
    return name


class SafetensorsReader(WeightReader):
    """Reads from `files`; ModelError if one is truncated or corrupt, or if two of them hold the same tensor.

    rename: from the names in the files to those of the plan, None for a tensor that the model does not use.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        *,
        ignore: frozenset[str] = frozenset(),
        rename: Callable[[str], str | None] = keep_name,
    ) -> None:
        self._slices = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files = []
        for path in files:
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: truncated or corrupt safetensors file ({error})") from error
            self._files.append(file)
            for stored in sorted(file.keys()):
                name = rename(stored)
                if name is None or name in ignore or name.endswith(_IGNORED_SUFFIXES):
                    continue
                if name in self._slices:
                    raise ModelError(f"{path}: tensor {name} is in another file too")
                self._slices[name] = part = file.get_slice(stored)
                self._shapes[name] = tuple(part.get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, piece: Piece, out: torch.Tensor) -> None:
        part = self._slices[piece.name]
        if part.get_dtype() not in (_FLOATS if out.dtype.is_floating_point else _INTEGERS):
            raise ModelError(f"tensor {piece.name} has dtype {part.get_dtype()}, which is not supported")
        out.copy_(part[(*[slice(None)] * piece.dim, slice(piece.start, piece.stop))])

    def raw(self, name: str, index: int) -> torch.Tensor:
        """Tensor `name` at one index of its first dimension, in the dtype of the file."""
        return self._slices[name][index]
