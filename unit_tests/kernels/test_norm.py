"""RMSNorm, SwiGLU's elementwise half, embedding."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import DTYPES, assert_close, randn

ORACLE = ReferenceBackend()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 100, 576, 577])
def test_rms_norm(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype, size: int) -> None:
    weight = randn(generator, size, dtype=dtype)
    for shape in [(1, size), (9, size), (100, size), (3, 5, size)]:
        x = randn(generator, *shape, dtype=dtype) * 3
        assert_close(backend.rms_norm(x, weight, 1e-6), ORACLE.rms_norm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 100, 1536])
def test_silu_and_mul(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype, size: int) -> None:
    for num_tokens in (1, 7, 100):
        x = randn(generator, num_tokens, 2 * size, dtype=dtype) * 4
        assert_close(backend.silu_and_mul(x), ORACLE.silu_and_mul(x.double()))


def test_silu_of_large_values_stays_finite(backend: CpuBackend) -> None:
    gate = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, 1.0]])
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    assert_close(backend.silu_and_mul(x), ORACLE.silu_and_mul(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    table = randn(generator, 50, 24, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(backend.embedding(ids, table), ORACLE.embedding(ids, table))
