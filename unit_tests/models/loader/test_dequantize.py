"""Block formats against the gguf library."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from models.errors import ModelError
from models.loader.dequantize import dequantize_rows

Quant = GGMLQuantizationType
WRITABLE = [Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0, Quant.BF16, Quant.F16, Quant.F32]
K_FORMATS = [Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K]
# Where a block has float16 numbers: random bytes there would give infinities.
HALVES = {
    Quant.Q2_K: (80, 82),
    Quant.Q3_K: (108,),
    Quant.Q4_K: (0, 2),
    Quant.Q5_K: (0, 2),
    Quant.Q6_K: (208,),
}


@pytest.mark.parametrize("quant", WRITABLE, ids=lambda quant: quant.name)
def test_written_formats_are_read_back_bit_for_bit(quant):
    values = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    packed = gguf.quants.quantize(values, quant)
    ours = dequantize_rows(torch.from_numpy(packed.view(np.uint8).reshape(7, -1)), quant)
    assert ours.shape == (7, 96)
    assert np.array_equal(ours.float().numpy(), gguf.quants.dequantize(packed, quant).astype(np.float32))


@pytest.mark.parametrize("quant", [*K_FORMATS, Quant.Q4_0, Quant.Q5_0, Quant.Q5_1], ids=lambda quant: quant.name)
def test_random_blocks_are_read_like_the_library_does(quant):
    block, block_bytes = GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, size=(5, 3, block_bytes), dtype=np.uint8)
    for start in HALVES.get(quant, (0, 2) if quant is Quant.Q5_1 else (0,)):
        raw[..., start : start + 2] = rng.normal(size=(5, 3, 1)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(5, -1)
    ours = dequantize_rows(torch.from_numpy(raw), quant)
    assert ours.shape == (5, 3 * block)
    assert np.array_equal(ours.numpy(), gguf.quants.dequantize(raw, quant))


def test_a_format_that_nobody_knows_is_named():
    with pytest.raises(ModelError, match="Q8_1 is not supported"):
        dequantize_rows(torch.zeros(1, GGML_QUANT_SIZES[Quant.Q8_1][1], dtype=torch.uint8), Quant.Q8_1)
