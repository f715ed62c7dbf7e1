"""Rotary embedding and the write into pages: right values, and not one element elsewhere."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import DTYPES, assert_close, cos_sin_table, paged_case, randn

ORACLE = ReferenceBackend()
# (query heads, kv heads, head dim, rotated half, page size)
SHAPES = [(9, 3, 64, 32, 64), (4, 4, 16, 8, 16), (8, 1, 80, 40, 256), (8, 2, 128, 16, 64)]


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "half", "page_size"), SHAPES)
def test_rope_and_store(
    backend: CpuBackend,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    half: int,
    page_size: int,
    has_norm: bool,
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
    case = paged_case(generator, [70, 1, 33, 300], [1, 1, 33, 20], dtype=dtype, is_filled=False, **shape)
    num_tokens = case.batch.positions.shape[0]
    qkv = randn(generator, num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    norms = [randn(generator, head_dim, dtype=dtype) if has_norm else None for _ in range(2)]
    table = cos_sin_table(400, half)
    q = backend.rope_and_store(qkv, table, case.kv_layer, case.batch, num_q_heads, *norms)

    wide_pool = case.pool.double()
    wide_norms = [None if norm is None else norm.double() for norm in norms]
    wide_layer = wide_pool[:, :, case.layer]
    expected = ORACLE.rope_and_store(qkv.double(), table, wide_layer, case.batch, num_q_heads, *wide_norms)
    assert_close(q, expected)
    pages, rows = case.slots()
    assert_close(case.kv_layer[pages, :, :, rows], wide_layer[pages, :, :, rows])
    assert torch.equal(case.pool.isnan(), wide_pool.isnan()), "wrote elsewhere"


def test_values_are_stored_as_they_are(backend: CpuBackend, generator: torch.Generator) -> None:
    shape = {"num_kv_heads": 2, "head_dim": 16, "page_size": 16}
    case = paged_case(generator, [20], [20], dtype=torch.bfloat16, is_filled=False, **shape)
    qkv = randn(generator, 20, 6 * 16, dtype=torch.bfloat16)
    backend.rope_and_store(qkv, cos_sin_table(20, 8), case.kv_layer, case.batch, 2)
    pages, rows = case.slots()
    assert torch.equal(case.kv_layer[pages, :, 1, rows].flatten(1), qkv[:, 4 * 16 :])
