"""One layer's keys and values of a sequence, out of its pages into contiguous memory."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["context", "num_rows"], do_not_specialize_on_alignment=["table_ptr"])
def _gather_pages_kernel(
    kv_ptr, out_ptr, table_ptr, context, num_rows, num_heads, head_dim, page_stride, head_stride, kind_stride,
    P: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    index, head, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, P), tl.arange(0, D)
    positions = index * P + rows
    page = tl.load(table_ptr + index, mask=index * P < context, other=0).to(tl.int64)
    source = kv_ptr + page * page_stride + head.to(tl.int64) * head_stride + kind * kind_stride
    inside = (dims < head_dim)[None, :]
    mask = (positions < context)[:, None] & inside
    values = tl.load(source + rows[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
    target = out_ptr + (kind * num_heads + head).to(tl.int64) * num_rows * head_dim
    targets = target + positions[:, None] * head_dim + dims[None, :]
    tl.store(targets, values, mask=(positions < num_rows)[:, None] & inside)


def gather_pages(kv_layer: torch.Tensor, table: torch.Tensor, context: int, num_rows: int) -> torch.Tensor:
    """The first `context` tokens of the sequence whose pages are table int32 [pages], then zeros: [2, Hkv, rows, D].

    kv_layer: [pages, Hkv, 2, P, D], a layer of a page-major pool.
    """
    num_heads, page_size, head_dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
    out = kv_layer.new_empty(2, num_heads, num_rows, head_dim)
    _gather_pages_kernel[(triton.cdiv(num_rows, page_size), num_heads, 2)](
        kv_layer, out, table, context, num_rows, num_heads, head_dim, *kv_layer.stride()[:3],
        P=page_size, D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return out
