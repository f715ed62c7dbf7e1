"""Random weights of the right shapes, for benchmarks and tests: the same values at every tensor-parallel size."""

import hashlib

import torch

from models.weight_plan import Piece, WeightPlan, WeightReader

_SCALE = 0.02 * 3**0.5  # uniform in [-a, a] with the usual standard deviation of 0.02
_CHUNK_ELEMENTS = 1 << 18
_DEVICE_CHUNK_ELEMENTS = 1 << 24
_ROW_STEP, _COLUMN_STEP = 0x9E3779B1, 0x85EBCA77
_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)


class DummyReader(WeightReader):
    """Values are a hash of (seed, name, row, column), so that any slice can be made alone; norm weights are 1,
    integers (tables of indexes) the column."""

    writes_to_devices = True

    def __init__(self, plan: WeightPlan, seed: int) -> None:
        self._shapes = {piece.name: piece.shape for pieces in plan.pieces.values() for piece in pieces}
        self._seed = seed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, piece: Piece, out: torch.Tensor) -> None:
        if piece.name.endswith("norm.weight"):
            out.fill_(1.0 - piece.offset)
            return
        if out.dim() == 3 and piece.dim > 0:  # a matrix an expert, each of other values
            for index, matrix in enumerate(out):
                name = f"{piece.name}.{index}"
                self.read(Piece(name, piece.shape[1:], piece.dim - 1, piece.start, piece.stop), matrix)
            return
        first_row, first_column = (piece.start, 0) if piece.dim == 0 else (0, piece.start)
        matrix = out.flatten(1) if out.dim() > 1 else out.unsqueeze(1)
        device = out.device
        if not out.dtype.is_floating_point:
            matrix.copy_(torch.arange(matrix.shape[1], device=device).expand_as(matrix))
            return
        columns = torch.arange(first_column, first_column + matrix.shape[1], device=device).mul_(_COLUMN_STEP)
        columns += self._tensor_seed(piece.name)
        chunk = _CHUNK_ELEMENTS if device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
        step = max(1, chunk // matrix.shape[1])
        for row in range(0, matrix.shape[0], step):
            part = matrix[row : row + step]
            rows = torch.arange(first_row + row, first_row + row + part.shape[0], device=device).mul_(_ROW_STEP)
            part.copy_(_uniform(rows[:, None] + columns))

    def _tensor_seed(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Mix the low 32 bits of int64 `bits` (two multiply-xorshift rounds) into floats in [-_SCALE, _SCALE)."""
    bits &= 0xFFFFFFFF
    for multiplier in _MULTIPLIERS:
        bits ^= bits >> 16
        bits.mul_(multiplier).bitwise_and_(0xFFFFFFFF)
    bits ^= bits >> 15
    return bits.float().mul_(2 * _SCALE / 2**32).sub_(_SCALE)
