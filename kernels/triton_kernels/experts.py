"""Mixture of SwiGLU experts: tokens sorted by expert on the device, one program a (expert, block of columns).

Nothing about the routing is read on the host, so a step can be captured. A program walks over its expert's tokens,
BLOCK_M at a time; experts without tokens cost a launch of nothing.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _product(
    x_ptr, weight_ptr, rows, is_row, columns, num_columns, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x[rows] @ weight[columns]^T, float32 [BLOCK_M, BLOCK_N]; both are rows of `width` values."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        inside = (inner < width)[None, :]
        x = tl.load(x_ptr + rows[:, None] * width + inner[None, :], mask=is_row[:, None] & inside, other=0.0)
        mask = (columns < num_columns)[:, None] & inside
        weight = tl.load(weight_ptr + columns[:, None].to(tl.int64) * width + inner[None, :], mask=mask, other=0.0)
        sums = tl.dot(x, weight.T, sums, input_precision="ieee")
    return sums


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, starts_ptr, top_k, hidden, inner, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_ptr = weight_ptr + expert * 2 * inner * hidden
    up_ptr = gate_ptr + inner.to(tl.int64) * hidden
    end = tl.load(starts_ptr + expert + 1)
    for first in range(tl.load(starts_ptr + expert), end, BLOCK_M):
        places = first + tl.arange(0, BLOCK_M)
        is_row = places < end
        tokens = tl.load(order_ptr + places, mask=is_row, other=0) // top_k
        gate = _product(x_ptr, gate_ptr, tokens, is_row, columns, inner, hidden, BLOCK_M, BLOCK_N, BLOCK_K)
        up = _product(x_ptr, up_ptr, tokens, is_row, columns, inner, hidden, BLOCK_M, BLOCK_N, BLOCK_K)
        out = gate * tl.sigmoid(gate) * up
        targets = out_ptr + places.to(tl.int64)[:, None] * inner + columns[None, :]
        tl.store(targets, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (columns < inner)[None, :])


@triton.jit
def _down_kernel(
    x_ptr, weight_ptr, shares_ptr, out_ptr, order_ptr, starts_ptr, hidden, inner, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(starts_ptr + expert + 1)
    for first in range(tl.load(starts_ptr + expert), end, BLOCK_M):
        places = first + tl.arange(0, BLOCK_M)
        is_row = places < end
        pairs = tl.load(order_ptr + places, mask=is_row, other=0)
        weights = weight_ptr + expert * hidden * inner
        out = _product(x_ptr, weights, places.to(tl.int64), is_row, columns, hidden, inner, BLOCK_M, BLOCK_N, BLOCK_K)
        out *= tl.load(shares_ptr + pairs, mask=is_row, other=0.0).to(tl.float32)[:, None]
        targets = out_ptr + pairs[:, None] * hidden + columns[None, :]
        tl.store(targets, out, mask=is_row[:, None] & (columns < hidden)[None, :])


def experts_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> torch.Tensor:
    """See `KernelBackend.moe_mlp`."""
    (num_tokens, hidden), (num_experts, _, inner) = x.shape, down_weights.shape
    top_k = expert_ids.shape[1]
    ids, order = expert_ids.flatten().sort(stable=True)  # order int64 [T * K]: pairs (token, choice) by expert
    starts = torch.searchsorted(ids, torch.arange(num_experts + 1, device=x.device), out_int32=True)
    block_m = 16 if num_tokens * top_k <= 32 * num_experts else 64
    blocks = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64 if x.element_size() == 2 else 32}
    hidden_states = x.new_empty(num_tokens * top_k, inner)
    _gate_up_kernel[(num_experts, triton.cdiv(inner, 64))](
        x, gate_up_weights, hidden_states, order, starts, top_k, hidden, inner, **blocks, num_warps=4, num_stages=3
    )
    parts = torch.empty(num_tokens * top_k, hidden, dtype=torch.float32, device=x.device)
    _down_kernel[(num_experts, triton.cdiv(hidden, 64))](
        hidden_states, down_weights, expert_weights, parts, order, starts, hidden, inner, **blocks, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return parts.view(num_tokens, top_k, hidden).sum(1).to(x.dtype)
