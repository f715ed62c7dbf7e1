"""Per-head norm, rotation and the write of new keys and values into their pages, one program a (token, head).

The rotation is the half-split form (Su et al. 2021, in llama's order of dimensions).
"""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionBatch


@triton.jit
def _normalised(x, scale, weight_ptr, dims, inside, dtype: tl.constexpr):
    """x * scale * weight, rounded to the model dtype as a separate norm would, in float32."""
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    return (x * scale * weight).to(dtype).to(tl.float32)


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr, cos_sin_ptr, kv_ptr, q_out_ptr, page_table_ptr, positions_ptr, sequence_ids_ptr, q_norm_ptr, k_norm_ptr,
    num_q_heads, num_kv_heads, head_dim, half, max_pages, page_size, page_stride, head_stride, kind_stride,
    token_stride, eps, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # q heads, then k heads, then v heads
    position = tl.load(positions_ptr + token)
    is_q, is_v = head < num_q_heads, head >= num_q_heads + num_kv_heads
    dims = tl.arange(0, BLOCK)
    inside = dims < head_dim
    # The partner of dimension d < half is d + half, of half <= d < 2 half it is d - half; others pass through.
    partner = tl.where(dims < half, dims + half, dims - half)
    rotated = dims < 2 * half
    source = qkv_ptr + (token * (num_q_heads + 2 * num_kv_heads) + head) * head_dim
    x = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    if is_v == 0:
        y = tl.load(source + partner, mask=rotated, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / head_dim + eps)
        if HAS_Q_NORM and is_q:
            x = _normalised(x, scale, q_norm_ptr, dims, inside, dtype)
            y = _normalised(y, scale, q_norm_ptr, partner, rotated, dtype)
        if HAS_K_NORM and is_q == 0:
            x = _normalised(x, scale, k_norm_ptr, dims, inside, dtype)
            y = _normalised(y, scale, k_norm_ptr, partner, rotated, dtype)
        angle = position * 2 * half + tl.where(dims < half, dims, dims - half)
        cos = tl.load(cos_sin_ptr + angle, mask=rotated, other=1.0)
        sin = tl.load(cos_sin_ptr + angle + half, mask=rotated, other=0.0)
        x = x * cos + tl.where(dims < half, -y, y) * sin
    if is_q:
        tl.store(q_out_ptr + (token * num_q_heads + head) * head_dim + dims, x.to(dtype), mask=inside)
    else:
        sequence = tl.load(sequence_ids_ptr + token).to(tl.int64)
        page = tl.load(page_table_ptr + sequence * max_pages + position // page_size).to(tl.int64)
        kind = tl.where(is_v, 1, 0)
        kv_head = head - num_q_heads - kind * num_kv_heads
        target = page * page_stride + kv_head * head_stride + kind * kind_stride + (position % page_size) * token_stride
        tl.store(kv_ptr + target + dims, x.to(dtype), mask=inside)


def rope_and_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    num_q_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `KernelBackend.rope_and_store`; qkv [T, (Hq + 2 Hkv) * D] contiguous -> q [T, Hq, D]."""
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], kv_layer.shape[1], kv_layer.shape[4]
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    _rope_and_store_kernel[(num_tokens, num_q_heads + 2 * num_kv_heads)](
        qkv, cos_sin, kv_layer, q, batch.page_table, batch.positions, batch.sequence_ids,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        num_q_heads, num_kv_heads, head_dim, cos_sin.shape[1] // 2, batch.page_table.stride(0), batch.page_size,
        *kv_layer.stride()[:4], eps, HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None,
        BLOCK=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return q
