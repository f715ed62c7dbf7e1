"""Attention of single new tokens over their sequences' pages, split over the context (Flash-Decoding, Dao et al. 2023).

One program a (sequence, kv head, split): it holds all query heads of the kv head's group, so each key is read once. A
second kernel merges the splits by their log-sum-exp. Sequences of several new tokens are left to `paged_prefill`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.interface import AttentionBatch
from kernels.triton_kernels.paged_prefill import LOG2_E, _load_rows, pool_rows, row_strides

TARGET_PROGRAMS = 528  # 4 a multiprocessor of the largest chip in use (132)
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["max_pages"])
def _paged_decode_kernel(
    q_ptr, out_ptr, partial_ptr, lse_ptr, kv_ptr, kv_rows, page_table_ptr, query_starts_ptr, context_lens_ptr,
    sinks_ptr, max_pages, num_q_heads, head_dim, group, page_rows, head_rows, kind_rows, qk_scale, window,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_starts_ptr + sequence)
    is_single = tl.load(query_starts_ptr + sequence + 1) - begin == 1
    context = tl.load(context_lens_ptr + sequence)
    num_pages = tl.cdiv(context, P)
    floor, start = 0, 0  # first key that is seen, and its page
    if WINDOW:
        floor = tl.maximum(context - window, 0)
        start = floor // P
    pages_a_split = tl.cdiv(num_pages - start, SPLITS)
    first_page = start + split * pages_a_split
    last_page = tl.minimum(first_page + pages_a_split, num_pages)
    members, dims, key_rows = tl.arange(0, GROUP), tl.arange(0, D), tl.arange(0, P)
    heads = kv_head * group + members
    table = page_table_ptr + sequence.to(tl.int64) * max_pages
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if is_single & (first_page < last_page):
        q_mask = (members < group)[:, None] & (dims < head_dim)[None, :]
        q_offsets = (begin.to(tl.int64) * num_q_heads + heads)[:, None] * head_dim + dims[None, :]
        q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
        accumulator = tl.zeros([GROUP, D], tl.float32)
        highest = tl.full([GROUP], -1e30, tl.float32)
        total_weight = tl.zeros([GROUP], tl.float32)
        if SINKS:  # known when the kernel is compiled, which `split` is not
            is_first = split == 0
            sink = tl.load(sinks_ptr + heads, mask=members < group, other=0.0) * 1.4426950408889634
            highest = tl.where(is_first, sink, highest)
            total_weight = tl.where(is_first, tl.full([GROUP], 1.0, tl.float32), total_weight)
        for index in range(first_page, last_page):
            row = tl.load(table + index) * page_rows + kv_head * head_rows
            keys = _load_rows(kv_ptr, kv_rows, row, head_dim, P, D, DESCRIPTOR)
            scores = tl.dot(q, keys.T, input_precision="ieee") * qk_scale
            inside = index * P + key_rows < context
            if WINDOW:
                inside = inside & (index * P + key_rows >= floor)
            scores = tl.where(inside[None, :], scores, -1e30)
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            decay = tl.exp2(highest - new_highest)
            weights = tl.where(inside[None, :], tl.exp2(scores - new_highest[:, None]), 0.0)
            total_weight = total_weight * decay + tl.sum(weights, 1)
            accumulator = accumulator * decay[:, None]
            values = _load_rows(kv_ptr, kv_rows, row + kind_rows, head_dim, P, D, DESCRIPTOR)
            # Rows outside of the context hold whatever was there: a weight of zero does not silence a NaN.
            values = tl.where(inside[:, None], values, tl.zeros_like(values))
            accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision="ieee")
            highest = new_highest
        accumulator = accumulator / total_weight[:, None]
        if SPLITS == 1:
            tl.store(out_ptr + q_offsets, accumulator.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            entries = (sequence.to(tl.int64) * num_q_heads + heads) * SPLITS + split
            tl.store(partial_ptr + entries[:, None] * head_dim + dims[None, :], accumulator, mask=q_mask)
            tl.store(lse_ptr + entries, highest + tl.log2(total_weight), mask=members < group)


@triton.jit
def _merge_splits_kernel(
    partial_ptr, lse_ptr, out_ptr, query_starts_ptr, context_lens_ptr, num_q_heads, head_dim, window,
    SPLITS: tl.constexpr, P: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_starts_ptr + sequence)
    is_single = tl.load(query_starts_ptr + sequence + 1) - begin == 1
    context = tl.load(context_lens_ptr + sequence)
    num_pages = tl.cdiv(context, P)
    if WINDOW:
        num_pages -= tl.maximum(context - window, 0) // P
    num_used = tl.cdiv(num_pages, tl.cdiv(num_pages, SPLITS))  # splits that had a page
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if is_single:
        splits, dims = tl.arange(0, SPLITS), tl.arange(0, D)
        entries = (sequence.to(tl.int64) * num_q_heads + head) * SPLITS + splits
        is_used, inside = splits < num_used, dims < head_dim
        lse = tl.load(lse_ptr + entries, mask=is_used, other=-1e30)
        weights = tl.exp2(lse - tl.max(lse, 0))
        mask = is_used[:, None] & inside[None, :]
        partial = tl.load(partial_ptr + entries[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        out = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
        offsets = (begin.to(tl.int64) * num_q_heads + head) * head_dim + dims
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def num_splits(num_sequences: int, num_kv_heads: int, max_context_len: int, page_size: int) -> int:
    """Programs a sequence and head: enough to fill the chip, a power of two, at least two pages each."""
    wanted = TARGET_PROGRAMS // max(num_sequences * num_kv_heads, 1)
    most = max(triton.cdiv(max_context_len, 2 * page_size), 1)
    return min(1 << max(min(wanted, most), 1).bit_length() - 1, MAX_SPLITS)


def paged_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the attention of all sequences with exactly one new token into `out` [T, Hq, D]; other rows stay.

    window, sinks: as in `KernelBackend.paged_attention`.
    """
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, num_sequences = kv_layer.shape[1], batch.context_lens.shape[0]
    group = num_q_heads // num_kv_heads
    longest = batch.max_context_len if not window else min(batch.max_context_len, window + batch.page_size)
    splits = num_splits(num_sequences, num_kv_heads, longest, batch.page_size)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    use_descriptor = q.is_cuda and q.element_size() == 2 and block_d == head_dim
    rows = pool_rows(kv_layer)
    descriptor = TensorDescriptor.from_tensor(rows, [batch.page_size, head_dim]) if use_descriptor else None
    partial = lse = out
    if splits > 1:
        partial = torch.empty(num_sequences, num_q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_sequences, num_q_heads, splits, dtype=torch.float32, device=q.device)
    launch = {"launch_pdl": True} if pdl else {}
    _paged_decode_kernel[(num_sequences, num_kv_heads, splits)](
        q, out, partial, lse, rows, descriptor, batch.page_table, batch.query_starts, batch.context_lens, sinks,
        batch.page_table.stride(0), num_q_heads, head_dim, group, *row_strides(kv_layer), scale * LOG2_E, window,
        SPLITS=splits, GROUP=max(triton.next_power_of_2(group), 16), P=batch.page_size, D=block_d,
        DESCRIPTOR=use_descriptor, PDL=pdl, num_warps=2 if use_descriptor else 4,
        num_stages=4 if use_descriptor else 2, WINDOW=window > 0, SINKS=sinks is not None, **launch,
    )  # fmt: skip
    if splits > 1:
        _merge_splits_kernel[(num_sequences, num_q_heads)](
            partial, lse, out, batch.query_starts, batch.context_lens, num_q_heads, head_dim, window,
            SPLITS=splits, P=batch.page_size, D=block_d, PDL=pdl, WINDOW=window > 0, num_warps=2, **launch,
        )  # fmt: skip
