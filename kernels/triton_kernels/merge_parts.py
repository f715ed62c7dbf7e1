"""Attention over two parts of the keys, merged by their log-sum-exp."""

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["first_lse_stride", "second_lse_stride"],
    do_not_specialize_on_alignment=["first_lse_ptr", "second_lse_ptr"],
)
def _merge_parts_kernel(
    first_ptr, first_lse_ptr, second_ptr, second_lse_ptr, out_ptr, num_heads, head_dim, first_lse_stride,
    second_lse_stride, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, D)
    is_head = heads < num_heads
    mask = is_head[:, None] & (dims < head_dim)[None, :]
    first_lse = tl.load(first_lse_ptr + heads * first_lse_stride + token, mask=is_head, other=0.0)
    second_lse = tl.load(second_lse_ptr + heads * second_lse_stride + token, mask=is_head, other=0.0)
    share = tl.sigmoid(first_lse - second_lse)[:, None]
    offsets = (token * num_heads + heads)[:, None] * head_dim + dims[None, :]
    first = tl.load(first_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = second + (first - second) * share
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def merge_parts(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Outputs [T, Hq, D] over each part and their natural log-sum-exps float32 [Hq, T] -> output [T, Hq, D] over both.

    Outputs are contiguous; of the log-sum-exps the last dimension is.
    """
    num_tokens, num_heads, head_dim = first.shape
    out = torch.empty_like(first)
    heads = min(triton.next_power_of_2(num_heads), 16)
    _merge_parts_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        first, first_lse, second, second_lse, out, num_heads, head_dim, first_lse.stride(0), second_lse.stride(0),
        HEADS=heads, D=triton.next_power_of_2(head_dim), num_warps=2,
    )  # fmt: skip
    return out
