"""Mixture of experts against the oracle."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import DTYPES, assert_close, randn

ORACLE = ReferenceBackend()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 100])
def test_moe_mlp(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype, num_tokens: int) -> None:
    experts, choices, hidden, inner = 6, 2, 48, 40
    x = randn(generator, num_tokens, hidden, dtype=dtype)
    gate_up = randn(generator, experts, 2 * inner, hidden, dtype=dtype) / 7
    down = randn(generator, experts, hidden, inner, dtype=dtype) / 7
    ids = torch.rand(num_tokens, experts - 1, generator=generator).topk(choices).indices  # the last is never chosen
    shares = torch.rand(num_tokens, choices, generator=generator).to(dtype)
    expected = ORACLE.moe_mlp(x.double(), ids, shares.double(), gate_up.double(), down.double())
    assert_close(backend.moe_mlp(x, ids, shares, gate_up, down), expected)
