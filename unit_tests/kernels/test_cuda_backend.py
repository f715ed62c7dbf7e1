"""The Triton kernels against the reference: compiled where there is a GPU, in Triton's interpreter elsewhere.

The interpreter is slow and has no bfloat16 products (it multiplies their bit patterns): without a GPU
fewer shapes run, and bfloat16 attention not at all.
"""

import pytest
import torch

from kernels import long_attention as long_attention_module
from kernels.cuda_backend import CudaBackend
from kernels.interface import AttentionBatch, Run
from kernels.long_attention import cudnn_sdpa, long_attention
from kernels.reference import ReferenceBackend
from kernels.triton_kernels.paged_decode import num_splits
from kernels.triton_kernels.skinny_linear import Fusion, Tiling, Workspace, few_tokens_linear

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
    [(1, 300), (64, 5000), (70, 2200)],
]
CASES = [(heads, runs) for heads in HEADS for runs in RUNS]
if not HAS_GPU:
    CASES = [
        ((4, 2, 32, 16), [(1, 40), (2, 2), (19, 50), (1, 1)]),
        ((3, 1, 64, 16), [(34, 34)]),
        ((4, 2, 80, 16), [(1, 17)]),
        ((2, 1, 32, 16), [(1, 33), (9, 300), (40, 270)]),
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
        runs=tuple(
            Run(sequence, int(starts[sequence]), length, context)
            for sequence, (length, context) in enumerate(runs)
            if length > 1
        ),
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
    cos_sin = torch.randn(max(context for _, context in runs), head_dim // 2 * 2, device=DEVICE)
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


WINDOW_CASES = [(heads, runs, window) for heads in HEADS for runs in RUNS for window in (1, 64, 127, 1000)]
if not HAS_GPU:
    WINDOW_CASES = [
        ((4, 2, 32, 16), [(1, 100), (2, 2), (40, 90), (1, 1)], 20),
        ((2, 1, 32, 16), [(1, 70), (9, 300)], 64),
        ((4, 2, 32, 16), [(1, 35), (20, 20)], 0),
    ]


@pytest.mark.parametrize("dtype", TOLERANCE if HAS_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "runs", "window"), WINDOW_CASES, ids=str)
def test_windows_and_sinks_equal_the_reference(
    heads: tuple[int, int, int, int], runs: list[tuple[int, int]], window: int, dtype: torch.dtype
):
    """Pages below all windows of a sequence hold NaN, and their ids lie out of range."""
    num_q_heads, num_kv_heads, head_dim, page_size = heads
    torch.manual_seed(window)
    batch, num_pages = make_batch(runs, page_size)
    pool = torch.randn(num_pages, num_kv_heads, 2, 2, page_size, head_dim, device=DEVICE).to(dtype)
    for (length, context), table in zip(runs, batch.page_table, strict=True):
        first = max(0, context - length + 1 - window) // page_size if window else 0
        pool[table[:first].long()] = float("nan")
        table[:first] = 1 << 30
    q = torch.randn(sum(length for length, _ in runs), num_q_heads, head_dim, device=DEVICE).to(dtype)
    for sinks in (None, 3 * torch.randn(num_q_heads, device=DEVICE)):
        arguments = (q, pool[:, :, 1], batch, head_dim**-0.5, window, sinks)
        out, expected = (backend.paged_attention(*arguments) for backend in (CudaBackend(), ReferenceBackend()))
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 96), (5, 1000)])
def test_small_operations_equal_the_reference(num_tokens: int, width: int, dtype: torch.dtype):
    torch.manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, width, device=DEVICE).to(dtype), torch.randn(width, device=DEVICE).to(dtype)
    cuda, reference = CudaBackend(), ReferenceBackend()
    assert relative_error(cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < TOLERANCE[dtype]
    assert relative_error(cuda.silu_and_mul(x), reference.silu_and_mul(x)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "rows"), [(64, 48), (96, 40), (1000, 72)])
def test_linears_of_one_token_equal_the_reference(width: int, rows: int, dtype: torch.dtype):
    torch.manual_seed(width)
    x, norm = torch.randn(1, width, device=DEVICE).to(dtype), torch.rand(width, device=DEVICE).to(dtype)
    weight, bias = torch.randn(rows, width, device=DEVICE).to(dtype), torch.randn(rows, device=DEVICE).to(dtype)
    cuda, reference = CudaBackend(), ReferenceBackend()
    for name, arguments in {
        "linear": (x, weight),
        "norm_linear": (x, norm, 1e-5, weight, bias),
        "norm_gate_up": (x, norm, 1e-5, weight),
        "logits": (x, norm, 1e-5, weight),
    }.items():
        out, expected = (getattr(backend, name)(*arguments) for backend in (cuda, reference))
        assert out.dtype == expected.dtype
        assert relative_error(out, expected) < TOLERANCE[dtype], name
    streams = [torch.randn(1, rows, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype) for _ in range(2)]
    for backend, stream in zip((cuda, reference), streams, strict=True):
        backend.linear_residual(x, weight, stream, bias)
    assert relative_error(streams[0], streams[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 32, 64])
@pytest.mark.parametrize("width", [512, 8192])
@pytest.mark.skipif(not HAS_GPU, reason="the backend asks for these kernels on a GPU only")
def test_residuals_of_few_tokens_equal_the_reference(num_tokens: int, width: int):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, width, device=DEVICE).bfloat16()
    weight = torch.randn(192, width, device=DEVICE).bfloat16()
    streams = [torch.full((num_tokens, 192), 3.0, device=DEVICE).bfloat16() for _ in range(2)]
    cuda = CudaBackend()
    for _ in range(3):  # the counters of split sums are left as they were
        cuda.linear_residual(x, weight, streams[0])
        ReferenceBackend().linear_residual(x, weight, streams[1])
    assert relative_error(streams[0], streams[1]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("fused", ["norm", "gated", "bias", "residual"])
@pytest.mark.parametrize(("num_tokens", "splits"), [(3, 1), (3, 2), (20, 3)])
def test_linears_of_few_tokens_equal_the_reference(num_tokens: int, splits: int, fused: str):
    torch.manual_seed(num_tokens)
    width, rows = 80, 48
    x, weight = torch.randn(num_tokens, width, device=DEVICE), torch.randn(rows, width, device=DEVICE)
    norm, bias = torch.rand(width, device=DEVICE), torch.randn(rows, device=DEVICE)
    reference = ReferenceBackend()
    expected = {
        "norm": reference.norm_linear(x, norm, 1e-5, weight),
        "gated": reference.silu_and_mul(reference.linear(x, weight)),
        "bias": reference.linear(x, weight, bias),
        "residual": reference.linear(x, weight) + 2.0,
    }[fused]
    fusion = Fusion(
        norm if fused == "norm" else None,
        1e-5,
        bias if fused == "bias" else None,
        fused == "gated",
        fused == "residual",
    )
    workspace = Workspace(DEVICE)
    for _ in range(2):
        out = torch.full_like(expected, 2.0)
        few_tokens_linear(x, weight, out, fusion, Tiling(16, 32, splits, 2), workspace, pdl=False)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
    assert not workspace.arrived.any()


@pytest.mark.parametrize("dtype", TOLERANCE if HAS_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (7, 3), (90, 2)] if HAS_GPU else [(1, 2), (7, 3)])
def test_experts_equal_the_reference(num_tokens: int, top_k: int, dtype: torch.dtype):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 80, device=DEVICE).to(dtype)
    ids = torch.rand(num_tokens, 5, device=DEVICE).argsort(-1)[:, :top_k]  # not all experts get a token
    shares = torch.rand(num_tokens, top_k, device=DEVICE).to(dtype)
    gate_up, down = torch.randn(6, 96, 80, device=DEVICE).to(dtype), torch.randn(6, 80, 48, device=DEVICE).to(dtype)
    arguments = (x, ids, shares, gate_up / 9, down / 7)
    out, expected = CudaBackend().moe_mlp(*arguments), ReferenceBackend().moe_mlp(*arguments)
    assert relative_error(out, expected) < TOLERANCE[dtype]


def by_torch(q, k, v, is_causal, scale):
    """What cuDNN gives, without cuDNN."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0).float(), v.repeat_interleave(group, 0).float()
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(scores, -1) @ v
    return out.transpose(0, 1).to(q.dtype).contiguous(), scores.logsumexp(-1)


SDPAS = [by_torch, cudnn_sdpa] if HAS_GPU else [by_torch]


@pytest.mark.parametrize("sdpa", SDPAS)
@pytest.mark.parametrize("run", [(512, 512), (100, 100), (512, 2560), (70, 2200), (600, 4170)], ids=str)
def test_long_attention_equals_the_reference(run: tuple[int, int], sdpa, monkeypatch: pytest.MonkeyPatch):
    if not HAS_GPU:  # small units for the interpreter
        monkeypatch.setattr(long_attention_module, "RUN_UNIT", 16)
        monkeypatch.setattr(long_attention_module, "PREFIX_UNIT", 64)
        run = (run[0] // 32 + 1, run[1] // 32 + 5)
    dtype = torch.float32 if sdpa is by_torch else torch.bfloat16
    torch.manual_seed(run[1])
    batch, num_pages = make_batch([run], 16)
    pool = torch.full((num_pages, 2, 2, 2, 16, 64), float("nan"), dtype=dtype, device=DEVICE)
    for index, page in enumerate(batch.page_table[0, : -(-run[1] // 16)].tolist()):
        pool[page, ..., : run[1] - 16 * index, :] = torch.randn(2, 2, 2, min(16, run[1] - 16 * index), 64).to(dtype)
    q = torch.randn(run[0], 4, 64, device=DEVICE).to(dtype)
    out = long_attention(q, pool[:, :, 1], batch.page_table[0], run[1], 0.125, sdpa)
    expected = ReferenceBackend().paged_attention(q, pool[:, :, 1], batch, 0.125)
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_splits_fill_the_chip_and_keep_two_pages_each():
    assert num_splits(1, 8, 32768, 64) == 64
    assert num_splits(256, 8, 1024, 64) == 1
    assert num_splits(1, 8, 64, 64) == 1
    assert num_splits(1, 8, 1024, 64) == 8
