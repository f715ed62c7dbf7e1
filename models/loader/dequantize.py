"""GGUF block formats to floats, as ggml defines them, with torch operations over many blocks at once.

The common formats are written out here (several times faster than `gguf.quants`, with bit-equal results in float32);
the others go through that library.
"""

from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from models.errors import ModelError

Quant = GGMLQuantizationType
_PLAIN = {Quant.F64: torch.float64, Quant.F32: torch.float32, Quant.F16: torch.float16, Quant.BF16: torch.bfloat16}


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block -> float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] -> float32 [n, 2k]: all low nibbles, then all high ones."""
    count, width = packed.shape
    out = torch.empty(count, 2, width)
    out[:, 0] = packed & 15
    out[:, 1] = packed >> 4
    return out.view(count, 2 * width)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Bits 0 to 31 of the uint32 at byte `start`, each worth 16 -> float32 [n, 32]."""
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).reshape(-1, 32).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 6-bit scales and minima of Q4_K and Q5_K, uint8 [n, 12] -> two float32 [n, 8, 1]."""
    low, mins, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((mins & 63, (high >> 4) | ((mins >> 2) & 48)), dim=1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _k_affine(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """d * scale * quant - dmin * min for quants float32 [n, 8, 32] of Q4_K and Q5_K blocks -> [n, 256]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    step = scales.mul_(_half(blocks, 0).unsqueeze(-1))
    base = minima.mul_(_half(blocks, 2).unsqueeze(-1))
    return quants.mul_(step).sub_(base).view(-1, 256)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 128] -> float32 [n, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    return _nibbles(packed.reshape(-1, 32)).view(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]  # [n, 8, 32]
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]).add_(((bits & 1) << 4).float()))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((pairs & 3) << 4).reshape(-1, 8, 32).float()
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    return low.add_(high).sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1)).view(-1, 256)


_FAST: dict[Quant, Callable[[torch.Tensor], torch.Tensor]] = {
    Quant.Q4_0: _q4_0,
    Quant.Q4_1: _q4_1,
    Quant.Q5_0: _q5_0,
    Quant.Q5_1: _q5_1,
    Quant.Q8_0: _q8_0,
    Quant.Q4_K: _q4_k,
    Quant.Q5_K: _q5_k,
    Quant.Q6_K: _q6_k,
}


def dequantize_rows(rows: torch.Tensor, quant: GGMLQuantizationType) -> torch.Tensor:
    """Rows of raw bytes uint8 [n, bytes of whole blocks] -> floats [n, K]; float32 for the quantized formats.

    Raises ModelError for a format that neither this module nor `gguf.quants` knows.
    """
    if quant in _PLAIN:
        return rows.contiguous().view(_PLAIN[quant])
    block_bytes = GGML_QUANT_SIZES[quant][1]
    if quant in _FAST:
        return _FAST[quant](rows.reshape(-1, block_bytes)).view(rows.shape[0], -1)
    try:
        return torch.from_numpy(dequantize(rows.contiguous().numpy(), quant))
    except NotImplementedError as error:
        raise ModelError(f"GGUF quantization {quant.name} is not supported") from error
