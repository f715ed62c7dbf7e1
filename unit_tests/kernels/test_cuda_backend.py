"""The Triton kernels against the reference: compiled where there is a GPU, in Triton's interpreter elsewhere.

The interpreter is slow and has no bfloat16 products (it multiplies their bit patterns): without a GPU
fewer shapes run, and bfloat16 attention not at all.
"""

import pytest
import torch

from kernels.cuda_backend import CudaBackend
from kernels.interface import AttentionBatch
from kernels.reference import ReferenceBackend
from kernels.triton_kernels.paged_decode import num_splits

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
HEADS = [(9, 3, 64, 64), (8, 2, 32, 16), (4, 4, 80, 16), (8, 1, 128, 64)]  # Hq, Hkv, D, page size
RUNS = [
    [(1, 70), (5, 5), (40, 100), (1, 1), (33, 64)],  # (new tokens, context) by sequence
    [(1, 1)],
    [(1, 130), (1, 64), (1, 65)],
    [(150, 150)],
    [(64, 128), (2, 129)],
]
CASES = [(heads, runs) for heads in HEADS for runs in RUNS]
if not HAS_GPU:
    CASES = [
        ((4, 2, 32, 16), [(1, 40), (2, 2), (19, 50), (1, 1)]),
        ((3, 1, 64, 16), [(34, 34)]),
        ((4, 2, 80, 16), [(1, 17)]),
    ]


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def make_batch(runs: list[tuple[int, int]], page_size: int) -> tuple[AttentionBatch, int]:
    """A batch over shuffled pages, and the size of its pool; table entries past a sequence's pages are out of range."""
    need = [-(-context // page_size) for _, context in runs]
    pages = torch.randperm(sum(need) + 3)
    table = torch.full((len(runs), max(need) + 1), 1 << 30, dtype=torch.int32)
    for row, count in enumerate(need):
        table[row, :count] = pages[sum(need[:row]) : sum(need[:row]) + count]
    lengths = torch.tensor([length for length, _ in runs])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    batch = AttentionBatch(
        query_starts=starts.int().to(DEVICE),
        context_lens=torch.tensor([context for _, context in runs], dtype=torch.int32, device=DEVICE),
        page_table=table.to(DEVICE),
        positions=torch.cat([torch.arange(context - length, context) for length, context in runs]).to(DEVICE),
        sequence_ids=torch.repeat_interleave(torch.arange(len(runs)), lengths).int().to(DEVICE),
        max_query_len=int(lengths.max()),
        max_context_len=max(context for _, context in runs),
        page_size=page_size,
    )
    return batch, len(pages)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "runs"), CASES, ids=str)
def test_store_and_attention_equal_the_reference(
    heads: tuple[int, int, int, int], runs: list[tuple[int, int]], dtype: torch.dtype
):
    num_q_heads, num_kv_heads, head_dim, page_size = heads
    torch.manual_seed(len(runs) * head_dim)
    batch, num_pages = make_batch(runs, page_size)
    num_tokens = sum(length for length, _ in runs)
    pool = torch.randn(num_pages, num_kv_heads, 2, 2, page_size, head_dim, device=DEVICE).to(dtype)
    for (_, context), table in zip(runs, batch.page_table.tolist(), strict=True):
        if context % page_size:  # rows behind the context are garbage in real life
            pool[table[context // page_size], :, :, :, context % page_size :] = float("nan")
    expected_pool = pool.clone()
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    cos_sin = torch.randn(256, head_dim // 2 * 2, device=DEVICE)
    norms = [torch.rand(head_dim, device=DEVICE).to(dtype) if head_dim == 128 else None for _ in range(2)]
    arguments = (batch, num_q_heads, *norms)
    q = CudaBackend().rope_and_store(qkv, cos_sin, pool[:, :, 1], *arguments)
    expected_q = ReferenceBackend().rope_and_store(qkv, cos_sin, expected_pool[:, :, 1], *arguments)
    assert relative_error(q, expected_q) < TOLERANCE[dtype]
    assert relative_error(pool.nan_to_num(), expected_pool.nan_to_num()) < TOLERANCE[dtype]
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    if dtype is torch.bfloat16 and not HAS_GPU:
        return
    out = CudaBackend().paged_attention(expected_q, expected_pool[:, :, 1], batch, head_dim**-0.5)
    expected = ReferenceBackend().paged_attention(expected_q, expected_pool[:, :, 1], batch, head_dim**-0.5)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 96), (5, 1000)])
def test_small_operations_equal_the_reference(num_tokens: int, width: int, dtype: torch.dtype):
    torch.manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, width, device=DEVICE).to(dtype), torch.randn(width, device=DEVICE).to(dtype)
    cuda, reference = CudaBackend(), ReferenceBackend()
    assert relative_error(cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < TOLERANCE[dtype]
    assert relative_error(cuda.silu_and_mul(x), reference.silu_and_mul(x)) < TOLERANCE[dtype]


def test_splits_fill_the_chip_and_keep_two_pages_each():
    assert num_splits(1, 8, 32768, 64) == 64
    assert num_splits(256, 8, 1024, 64) == 1
    assert num_splits(1, 8, 64, 64) == 1
    assert num_splits(1, 8, 1024, 64) == 8
