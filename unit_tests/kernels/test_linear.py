"""Linear layers, with and without what is fused into them, against the oracle in float64."""

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.jit import best_instruction_set
from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import DTYPES, TOLERANCE, assert_close, randn

ORACLE = ReferenceBackend()
TOKENS = [1, 2, 3, 5, 7, 8, 9, 17, 31, 33, 100]
SHAPES = [(48, 64), (100, 37), (33, 19), (576, 131)]  # (K, N)
FEWER_TOKENS, FEWER_SHAPES = [1, 5, 9, 33], [(100, 37)]


def cases(backend: CpuBackend) -> Iterator[tuple[int, int, int]]:
    """(tokens, K, N): all on the CPU's best instructions with two threads, a few on the rest (each one compiles)."""
    is_main = backend.instruction_set is best_instruction_set()
    tokens = TOKENS if is_main else FEWER_TOKENS
    shapes = SHAPES if is_main and backend.num_threads == 2 else FEWER_SHAPES
    return ((t, k, n) for k, n in shapes for t in tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    for num_tokens, k, n in cases(backend):
        weight, bias = randn(generator, n, k, dtype=dtype), randn(generator, n, dtype=dtype)
        x = randn(generator, num_tokens, k, dtype=dtype)
        expected = ORACLE.linear(x.double(), weight.double())
        assert_close(backend.linear(x, weight), expected)
        assert_close(backend.linear(x, weight, bias), expected + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_residual(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    for num_tokens, k, n in cases(backend):
        weight, bias = randn(generator, n, k, dtype=dtype), randn(generator, n, dtype=dtype)
        x = randn(generator, num_tokens, k, dtype=dtype)
        residual = randn(generator, num_tokens, n, dtype=torch.float32)
        for maybe_bias in (None, bias):
            expected, actual = residual.double(), residual.clone()
            wide_bias = None if maybe_bias is None else maybe_bias.double()
            ORACLE.linear_residual(x.double(), weight.double(), expected, wide_bias)
            backend.linear_residual(x, weight, actual, maybe_bias)
            assert_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_linear_leaves_its_input(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    for num_tokens, k, n in cases(backend):
        weight, norm = randn(generator, n, k, dtype=dtype), randn(generator, k, dtype=dtype)
        for stream_dtype in {dtype, torch.float32}:
            x = randn(generator, num_tokens, k, dtype=stream_dtype)
            before = x.clone()
            actual = backend.norm_linear(x, norm, 1e-5, weight)
            assert actual.dtype is dtype
            assert_close(actual, ORACLE.norm_linear(x.double(), norm.double(), 1e-5, weight.double()))
            assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_not_rounded_to_the_model_dtype(
    backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype
) -> None:
    for num_tokens, k, n in cases(backend):
        head, norm = randn(generator, n, k, dtype=dtype), randn(generator, k, dtype=dtype)
        x = randn(generator, num_tokens, k, dtype=torch.float32)
        actual = backend.logits(x, norm, 1e-5, head)
        assert actual.dtype is torch.float32
        normed = ORACLE.rms_norm(x, norm, 1e-5)
        assert_close(actual, normed.double() @ head.double().T, 1e-3 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gate_up(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    for num_tokens, k, n in cases(backend):
        weight, norm = randn(generator, 2 * n, k, dtype=dtype), randn(generator, k, dtype=dtype)
        x = randn(generator, num_tokens, k, dtype=dtype) / 4
        actual = backend.norm_gate_up(x, norm, 1e-5, weight)
        assert_close(actual, ORACLE.norm_gate_up(x.double(), norm.double(), 1e-5, weight.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_hardly_depends_on_its_batch(
    backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype
) -> None:
    weight, x = randn(generator, 160, 576, dtype=dtype), randn(generator, 100, 576, dtype=dtype)
    whole = backend.linear(x, weight)
    tolerance = 1e-6 if dtype is torch.float32 else 3e-3
    for num_tokens in (1, 4, 8, 16, 40, 64):
        assert_close(backend.linear(x[:num_tokens], weight), whole[:num_tokens], tolerance)


def test_misfits_are_refused(backend: CpuBackend) -> None:
    x, weight = torch.zeros(2, 32), torch.zeros(8, 32)
    with pytest.raises(ValueError, match="do not fit"):
        backend.linear(x, torch.zeros(8, 16))
    with pytest.raises(ValueError, match="contiguous"):
        backend.linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match="contiguous"):
        backend.linear(x, torch.zeros(32, 8).T)
    with pytest.raises(ValueError, match="float32"):
        backend.linear_residual(x.bfloat16(), weight.bfloat16(), torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float64"):
        backend.linear(x.double(), weight.double())


def test_strided_activations_are_accepted(backend: CpuBackend, generator: torch.Generator) -> None:
    wide, weight = randn(generator, 5, 64, dtype=torch.float32), randn(generator, 8, 32, dtype=torch.float32)
    assert_close(backend.linear(wide[:, ::2], weight), ORACLE.linear(wide[:, ::2], weight))
