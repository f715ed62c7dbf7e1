"""Matrices of experts that a checkpoint keeps as MXFP4 blocks (OCP Microscaling Formats 1.0): read as plain tensors.

NAME_blocks uint8 [experts, out, blocks, 16] holds 32 four-bit floats a block, the even ones in low nibbles, and
NAME_scales uint8 [experts, out, blocks] the exponent of their common power of two, plus 127. They stand for NAME
[experts, in, out] with in = 32 * blocks.
"""

import torch

from models.loader.safetensors import SafetensorsReader
from models.weight_plan import Piece, WeightReader

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_HALF, *(-value for value in _HALF)])
_EXPONENT_BIAS = 127


class Mxfp4Reader(WeightReader):
    """The tensors of `reader`, with those that are kept as blocks under their own names and shapes."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self._reader = reader
        found = reader.shapes()
        self._packed = {
            name.removesuffix(_BLOCKS): (shape[0], shape[2] * _BLOCK, shape[1])
            for name, shape in found.items()
            if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in found
        }
        hidden = {name + suffix for name in self._packed for suffix in (_BLOCKS, _SCALES)}
        self._shapes = {name: shape for name, shape in found.items() if name not in hidden} | self._packed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, piece: Piece, out: torch.Tensor) -> None:
        if piece.name not in self._packed:
            self._reader.read(piece, out)
            return
        inside = slice(piece.start, piece.stop)
        for expert in range(self._packed[piece.name][0]):
            if piece.dim == 0:
                if piece.start <= expert < piece.stop:
                    out[expert - piece.start].copy_(self._matrix(piece.name, expert))
            elif piece.dim == 1:
                out[expert].copy_(self._matrix(piece.name, expert)[inside])
            else:
                out[expert].copy_(self._matrix(piece.name, expert)[:, inside])

    def _matrix(self, name: str, expert: int) -> torch.Tensor:
        """float32 [in, out]."""
        blocks, scales = (self._reader.raw(name + suffix, expert) for suffix in (_BLOCKS, _SCALES))
        return dequantize_mxfp4(blocks, scales).T


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., blocks, 16] and exponents uint8 [..., blocks] -> float32 [..., 32 * blocks]."""
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., blocks, 32]
    values = torch.ldexp(_VALUES[nibbles.int()], scales.int().sub(_EXPONENT_BIAS).unsqueeze(-1))
    return values.flatten(-2)
