"""Per-head norm, rotation and the write of new keys and values into their pages, one program a (token, block of heads).

The rotation is the half-split form (Su et al. 2021, in llama's order of dimensions): a program holds the two halves
that are rotated into each other, and apart from them what follows the rotated dimensions.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.interface import AttentionBatch


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, scale, is_q, q_norm_ptr, k_norm_ptr, dims, inside, Q_NORM: tl.constexpr, K_NORM: tl.constexpr):
    """x [heads, dims] * scale * weight where the head has a norm."""
    if Q_NORM:
        x = tl.where(is_q[:, None], x * scale * _load(q_norm_ptr + dims, inside)[None, :], x)
    if K_NORM:
        x = tl.where(is_q[:, None], x, x * scale * _load(k_norm_ptr + dims, inside)[None, :])
    return x


@triton.jit(do_not_specialize=["max_pages"])
def _rope_and_store_kernel(
    qkv_ptr, cos_sin_ptr, kv_ptr, q_out_ptr, page_table_ptr, positions_ptr, sequence_ids_ptr, q_norm_ptr, k_norm_ptr,
    num_q_heads, num_kv_heads, head_dim, half, max_pages, page_size, page_stride, head_stride, kind_stride,
    token_stride, eps, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HALF, REST: sizes of blocks that hold half the rotated dimensions, and those behind them (0: there are none)."""
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # q heads, then k heads, then v heads
    num_heads = num_q_heads + 2 * num_kv_heads
    is_head, is_q, is_v = heads < num_heads, heads < num_q_heads, heads >= num_q_heads + num_kv_heads
    position = tl.load(positions_ptr + token)
    sequence = tl.load(sequence_ids_ptr + token).to(tl.int64)
    dims = tl.arange(0, HALF)
    inside = dims < half
    kinds = is_v.to(tl.int32)
    kv_heads = heads - num_q_heads - kinds * num_kv_heads
    q_targets = q_out_ptr + (token * num_q_heads + heads)[:, None] * head_dim
    sources = qkv_ptr + (token * num_heads + heads)[:, None] * head_dim
    mask = is_head[:, None] & inside[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, second = _load(sources + dims[None, :], mask), _load(sources + half + dims[None, :], mask)
    page = tl.load(page_table_ptr + sequence * max_pages + position // page_size).to(tl.int64)
    cos = _load(cos_sin_ptr + position * 2 * half + dims, inside)[None, :]
    sin = _load(cos_sin_ptr + position * 2 * half + half + dims, inside)[None, :]
    target = page * page_stride + (position % page_size) * token_stride
    targets = kv_ptr + target + (kv_heads.to(tl.int64) * head_stride + kinds.to(tl.int64) * kind_stride)[:, None]
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST > 0:
        rest_dims = 2 * half + tl.arange(0, REST)
        rest_inside = rest_dims < head_dim
        rest_mask = is_head[:, None] & rest_inside[None, :]
        rest = _load(sources + rest_dims[None, :], rest_mask)
        squares += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / head_dim + eps)[:, None]
    x = _scaled(first, scale, is_q, q_norm_ptr, k_norm_ptr, dims, inside, Q_NORM, K_NORM).to(dtype).to(tl.float32)
    y = _scaled(second, scale, is_q, q_norm_ptr, k_norm_ptr, dims + half, inside, Q_NORM, K_NORM)
    y = y.to(dtype).to(tl.float32)  # as a separate norm would round it
    x_out = tl.where(is_v[:, None], first, x * cos - y * sin).to(dtype)
    y_out = tl.where(is_v[:, None], second, y * cos + x * sin).to(dtype)
    q_mask, kv_mask = mask & is_q[:, None], mask & (is_q == 0)[:, None]
    tl.store(q_targets + dims[None, :], x_out, mask=q_mask)
    tl.store(q_targets + half + dims[None, :], y_out, mask=q_mask)
    tl.store(targets + dims[None, :], x_out, mask=kv_mask)
    tl.store(targets + half + dims[None, :], y_out, mask=kv_mask)
    if REST > 0:
        z = _scaled(rest, scale, is_q, q_norm_ptr, k_norm_ptr, rest_dims, rest_inside, Q_NORM, K_NORM)
        z = tl.where(is_v[:, None], rest, z).to(dtype)
        tl.store(q_targets + rest_dims[None, :], z, mask=rest_mask & is_q[:, None])
        tl.store(targets + rest_dims[None, :], z, mask=rest_mask & (is_q == 0)[:, None])


def rope_and_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    num_q_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """See `KernelBackend.rope_and_store`; qkv [T, (Hq + 2 Hkv) * D] contiguous -> q [T, Hq, D]."""
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], kv_layer.shape[1], kv_layer.shape[4]
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    half = cos_sin.shape[1] // 2
    num_heads = num_q_heads + 2 * num_kv_heads
    heads = min(triton.next_power_of_2(num_heads), 16 if num_tokens > 64 else 4)
    rest = head_dim - 2 * half
    _rope_and_store_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        qkv, cos_sin, kv_layer, q, batch.page_table, batch.positions, batch.sequence_ids,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        num_q_heads, num_kv_heads, head_dim, half, batch.page_table.stride(0), batch.page_size,
        *kv_layer.stride()[:4], eps, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, HEADS=heads,
        HALF=triton.next_power_of_2(half), REST=triton.next_power_of_2(rest) if rest else 0, PDL=pdl,
        num_warps=2 if heads > 4 else 1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q
