"""Linear layers of few tokens, at the speed of reading the weights: what comes before and after is done on the way.

A program owns BLOCK_N rows of the weight and runs over all of K, or over one of SPLITS parts of it; the program that
comes last to a block then adds the parts up in their order, so that a result does not depend on who came first. RMSNorm
is applied to the input as x * weight, and its scale to the sums; SwiGLU's gate, a bias and the residual are applied
before the only write. With one token the products run on the ordinary cores, else on the tensor cores with
the tokens as columns.

Programmatic dependent launch (PDL) lets a kernel start while the one before it ends: the first tile of weights, which
no kernel writes, is fetched before the wait.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weight_tile(weight_ptr, rows, start, num_rows, width, BLOCK_K: tl.constexpr):
    """weight[rows, start : start + BLOCK_K], zeros outside; read once, so it need not stay in the cache."""
    columns = start + tl.arange(0, BLOCK_K)
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    return tl.load(weight_ptr + offsets, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _one_token_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, num_columns, num_rows, width, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """num_rows: of the weight; num_columns: of the result, half as many where GATED."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = _weight_tile(weight_ptr, columns, 0, num_rows, width, BLOCK_K)
    if GATED:
        up_tile = _weight_tile(weight_ptr, columns + num_columns, 0, num_rows, width, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + inner, mask=inner < width, other=0.0).to(tl.float32)
        next_tile = _weight_tile(weight_ptr, columns, start + BLOCK_K, num_rows, width, BLOCK_K)
        if GATED:
            next_up_tile = _weight_tile(weight_ptr, columns + num_columns, start + BLOCK_K, num_rows, width, BLOCK_K)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + inner, mask=inner < width, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * x[None, :]
        tile = next_tile
        if GATED:
            up_sums += up_tile.to(tl.float32) * x[None, :]
            up_tile = next_up_tile
    out = tl.sum(sums, 1)
    up = tl.sum(up_sums, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        out *= scale
        up *= scale
    inside = columns < num_columns
    if GATED:
        out = out * tl.sigmoid(out) * up
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        out += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _few_tokens_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, num_tokens, num_columns, num_rows, width,
    eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial_ptr: float32 [SPLITS, blocks of columns, 3, BLOCK_M, BLOCK_N]; arrived_ptr: int32, zero, by block."""
    block, split = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    part = tl.cdiv(width, SPLITS * BLOCK_K) * BLOCK_K
    first, last = split * part, tl.minimum(split * part + part, width)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        tile = _weight_tile(weight_ptr, columns, start, num_rows, width, BLOCK_K)
        mask = is_token[:, None] & (inner < width)[None, :]
        x = tl.load(x_ptr + tokens[:, None] * width + inner[None, :], mask=mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            weight = tl.load(norm_ptr + inner, mask=inner < width, other=0.0).to(tl.float32)
            x = (wide * weight[None, :]).to(tile.dtype)
        sums = tl.dot(tile, x.T, sums, input_precision="ieee")
        if GATED:
            up_tile = _weight_tile(weight_ptr, columns + num_columns, start, num_rows, width, BLOCK_K)
            up_sums = tl.dot(up_tile, x.T, up_sums, input_precision="ieee")
    out, up = sums.T, up_sums.T  # [BLOCK_M, BLOCK_N]
    if SPLITS > 1:
        members = tl.arange(0, BLOCK_N)
        entries = tokens[:, None] * BLOCK_N + members[None, :]
        size: tl.constexpr = BLOCK_M * BLOCK_N
        stride = tl.num_programs(0) * 3 * size
        mine = partial_ptr + split * stride + block * 3 * size
        tl.store(mine + entries, out)
        if GATED:
            tl.store(mine + size + entries, up)
        if NORM:
            tl.store(mine + 2 * size + tokens, squares)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrived_ptr + block, 0)
        out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for other in range(SPLITS):
            theirs = partial_ptr + other * stride + block * 3 * size
            out += tl.load(theirs + entries, cache_modifier=".cg")
            if GATED:
                up += tl.load(theirs + size + entries, cache_modifier=".cg")
            if NORM:
                squares += tl.load(theirs + 2 * size + tokens, cache_modifier=".cg")
    if NORM:
        scale = tl.rsqrt(squares / width + eps)[:, None]
        out *= scale
        up *= scale
    inside = is_token[:, None] & (columns < num_columns)[None, :]
    targets = out_ptr + tokens.to(tl.int64)[:, None] * num_columns + columns[None, :]
    if GATED:
        out = out * tl.sigmoid(out) * up
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        out += tl.load(targets, mask=inside, other=0.0).to(tl.float32)
    tl.store(targets, out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Fusion:
    """What is done beside the product. norm: RMSNorm weight [K] for the input, with eps; bias [N].

    gated: the weight's rows are those of SwiGLU's gate, then of up, and the result is silu(gate) * up. residual: the
    result is added to the output, which then is the residual stream.
    """

    norm: torch.Tensor | None = None
    eps: float = 0.0
    bias: torch.Tensor | None = None
    gated: bool = False
    residual: bool = False


@dataclass(frozen=True)
class Tiling:
    """How `few_tokens_linear` cuts the weight; chosen by measurement."""

    block_n: int
    block_k: int
    splits: int
    num_stages: int
    num_warps: int = 4


def residual_tiling(x: torch.Tensor, weight: torch.Tensor) -> Tiling | None:
    """How x [T, K] @ weight [N, K]^T is cut when it is added to the stream; None where cuBLAS is as fast.

    Measured on an H200 for N = 4096 and K = 4096 and 12288.
    """
    num_tokens, (rows, width) = x.shape[0], weight.shape
    if not x.is_cuda or x.dtype is not torch.bfloat16 or rows > 8192 or width % 512:
        return None
    if num_tokens <= 16:
        return Tiling(64, 128, 4, 4)
    if num_tokens <= 32:
        return Tiling(64, 128, 2, 4)
    return None


class Workspace:
    """Memory for split sums, shared by all calls of one stream, which follow one another."""

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(8 << 20, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1 << 14, dtype=torch.int32, device=device)


def _launch_options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def one_token_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, fusion: Fusion, *, pdl: bool) -> None:
    """out [1, N] = fused x [1, K] @ weight^T; all contiguous."""
    num_columns, (num_rows, width) = out.shape[1], weight.shape
    if fusion.gated:
        block_n, block_k = 16, 256
    else:
        block_n, block_k = (16, 512) if num_columns >= 6144 else (8, 1024)
    _one_token_kernel[(triton.cdiv(num_columns, block_n),)](
        x, _or(fusion.norm, x), weight, _or(fusion.bias, x), out, num_columns, num_rows, width, fusion.eps,
        BLOCK_N=block_n, BLOCK_K=block_k, NORM=fusion.norm is not None, GATED=fusion.gated,
        BIAS=fusion.bias is not None, RESIDUAL=fusion.residual, PDL=pdl, num_warps=4, **_launch_options(pdl),
    )  # fmt: skip


def few_tokens_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    fusion: Fusion,
    tiling: Tiling,
    workspace: Workspace,
    *,
    pdl: bool,
) -> None:
    """out [T, N] = fused x [T, K] @ weight^T; all contiguous, T at most 64."""
    num_tokens, num_columns, (num_rows, width) = x.shape[0], out.shape[1], weight.shape
    _few_tokens_kernel[(triton.cdiv(num_columns, tiling.block_n), tiling.splits)](
        x, _or(fusion.norm, x), weight, _or(fusion.bias, x), out, workspace.partial, workspace.arrived, num_tokens,
        num_columns, num_rows, width, fusion.eps, BLOCK_M=max(16, triton.next_power_of_2(num_tokens)),
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SPLITS=tiling.splits, NORM=fusion.norm is not None,
        GATED=fusion.gated, BIAS=fusion.bias is not None, RESIDUAL=fusion.residual, PDL=pdl,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **_launch_options(pdl),
    )  # fmt: skip


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel wants some pointer where it reads nothing."""
    return other if tensor is None else tensor
