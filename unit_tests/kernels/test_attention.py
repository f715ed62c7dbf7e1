"""Paged attention against the oracle, with everything that must not be read poisoned."""

import dataclasses

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.jit import best_instruction_set
from kernels.interface import KernelShapes, UnsupportedModelError
from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import DTYPES, PagedCase, assert_close, paged_case, randn

ORACLE = ReferenceBackend()
# (query heads of a kv head, kv heads, head dim, page size)
SHAPES = [(3, 3, 64, 64), (1, 2, 16, 16), (4, 1, 80, 256), (8, 2, 128, 64), (2, 1, 256, 48), (5, 1, 32, 16)]
# (contexts, new tokens)
BATCHES = {
    "one decode": ([130], [1]),
    "decodes": ([1, 16, 17, 64, 65, 200, 31], [1] * 7),
    "one prefill": ([100], [100]),
    "a chunk": ([333], [70]),
    "mixed": ([77, 150, 3, 290, 1], [1, 33, 3, 40, 1]),
    "long decode": ([900], [1]),
}


def _compare(backend: CpuBackend, case: PagedCase, q: torch.Tensor, tolerance: float | None = None) -> None:
    scale = q.shape[-1] ** -0.5
    actual = backend.paged_attention(q, case.kv_layer, case.batch, scale)
    assert_close(actual, ORACLE.paged_attention(q.double(), case.kv_layer.double(), case.batch, scale), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "num_kv_heads", "head_dim", "page_size"), SHAPES)
def test_paged_attention(
    backend: CpuBackend,
    generator: torch.Generator,
    dtype: torch.dtype,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> None:
    if backend.instruction_set is not best_instruction_set() and head_dim > 80:
        pytest.skip("one large head dimension less to compile")
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
    for contexts, queries in BATCHES.values():
        case = paged_case(generator, contexts, queries, dtype=dtype, is_filled=True, **shape)
        _compare(backend, case, randn(generator, sum(queries), group * num_kv_heads, head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharp_and_large_scores(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Scores of several hundred: the running maximum must keep everything finite."""
    case = paged_case(
        generator, [400, 50], [1, 50], dtype=dtype, is_filled=True, num_kv_heads=2, head_dim=64, page_size=64
    )
    _compare(backend, case, 40 * randn(generator, 51, 6, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 37, 128, 1000])
def test_windows_and_sinks(backend: CpuBackend, generator: torch.Generator, dtype: torch.dtype, window: int) -> None:
    """Pages that lie whole below the windows of a sequence's queries hold NaN, and their ids point far outside."""
    shape = {"num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    for contexts, queries in BATCHES.values():
        case = paged_case(generator, contexts, queries, dtype=dtype, is_filled=True, **shape)
        q = randn(generator, sum(queries), 6, 64, dtype=dtype)
        sinks = 3 * torch.randn(6, generator=generator)
        for row, (context, new) in enumerate(zip(contexts, queries, strict=True)):
            first = max(0, context - new + 1 - window) // 16
            case.pool[case.batch.page_table[row, :first].long()] = float("nan")
            case.batch.page_table[row, :first] = 2**30
        for some in (None, sinks):
            wide = (q.double(), case.kv_layer.double(), case.batch, 0.125, window, some)
            expected = ORACLE.paged_attention(*wide)
            assert_close(backend.paged_attention(q, case.kv_layer, case.batch, 0.125, window, some), expected)


def test_a_large_sink_takes_all_and_a_small_one_nothing(backend: CpuBackend, generator: torch.Generator) -> None:
    case = paged_case(
        generator, [300], [2], dtype=torch.float32, is_filled=True, num_kv_heads=1, head_dim=32, page_size=16
    )
    q = randn(generator, 2, 2, 32, dtype=torch.float32)
    plain = backend.paged_attention(q, case.kv_layer, case.batch, 1.0)
    out = backend.paged_attention(q, case.kv_layer, case.batch, 1.0, 0, torch.tensor([500.0, -500.0]))
    assert out[:, 0].abs().max() < 1e-30
    assert_close(out[:, 1], plain[:, 1], 1e-6)


def test_a_query_does_not_depend_on_chunking(backend: CpuBackend, generator: torch.Generator) -> None:
    shape = {"num_kv_heads": 1, "head_dim": 64, "page_size": 64, "dtype": torch.float32}
    whole = paged_case(generator, [200], [200], is_filled=True, **shape)  # type: ignore[arg-type]
    q = randn(generator, 200, 3, 64, dtype=torch.float32)
    expected = backend.paged_attention(q, whole.kv_layer, whole.batch, 0.125)
    one = torch.ones(1, dtype=torch.int32)
    decode = dataclasses.replace(
        whole.batch,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        positions=torch.tensor([199]),
        sequence_ids=one - 1,
        max_query_len=1,
    )
    assert_close(backend.paged_attention(q[199:], whole.kv_layer, decode, 0.125), expected[199:], 1e-6)


def test_models_without_a_kernel_are_told_apart_before_a_step(backend: CpuBackend) -> None:
    fits = KernelShapes(head_dims=(64,), heads_per_kv=3)
    backend.check_model(torch.bfloat16, fits, 64)
    for dtype, shapes, page_size in (
        (torch.float16, fits, 64),
        (torch.float32, dataclasses.replace(fits, head_dims=(64, 24)), 64),
        (torch.float32, fits, 20),
        (torch.float32, dataclasses.replace(fits, heads_per_kv=97), 64),
    ):
        with pytest.raises(UnsupportedModelError):
            backend.check_model(dtype, shapes, page_size)


def test_odd_shapes_are_refused(backend: CpuBackend, generator: torch.Generator) -> None:
    case = paged_case(
        generator, [8], [8], dtype=torch.float32, is_filled=True, num_kv_heads=1, head_dim=24, page_size=16
    )
    with pytest.raises(ValueError, match="multiples of 16"):
        backend.paged_attention(torch.zeros(8, 1, 24), case.kv_layer, case.batch, 1.0)
    wrong = dataclasses.replace(case.batch, context_lens=case.batch.context_lens.long())
    with pytest.raises(ValueError, match="int32"):
        backend.paged_attention(torch.zeros(8, 1, 16), case.kv_layer[..., :16], wrong, 1.0)
