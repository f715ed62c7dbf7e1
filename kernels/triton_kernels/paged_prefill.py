"""Causal attention of runs of new tokens over their sequences' pages, page-major (FlashAttention-2, Dao 2023).

One program a (tile of BLOCK_M queries, query head). Tiles of all sequences form one list; a program finds its sequence
by a cumulative sum over the batch, so that nothing about lengths is needed on the host. Sequences of one new token are
left to `paged_decode`. Keys and values are read in whole pages: as rows of a descriptor over the pool (the bulk
copy engine of Hopper), or through pointers. Where there are few tiles and long contexts, several programs share
the keys of a tile, and a second kernel merges their results by log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.interface import AttentionBatch

LOG2_E = 1.4426950408889634
TARGET_PROGRAMS = 528  # 4 a multiprocessor of the largest chip in use (132)


@triton.jit
def _load_rows(kv_ptr, kv_rows, row, head_dim, P: tl.constexpr, D: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """Rows [row, row + P) of the pool seen as a matrix of head_dim columns -> [P, D]."""
    if DESCRIPTOR:
        return kv_rows.load([row, 0])
    dims = tl.arange(0, D)
    offsets = (row.to(tl.int64) + tl.arange(0, P))[:, None] * head_dim + dims[None, :]
    return tl.load(kv_ptr + offsets, mask=dims[None, :] < head_dim, other=0.0)


@triton.jit(do_not_specialize=["num_sequences", "max_pages", "longest"])
def _paged_prefill_kernel(
    q_ptr, out_ptr, partial_ptr, lse_ptr, kv_ptr, kv_rows, page_table_ptr, query_starts_ptr, context_lens_ptr,
    sinks_ptr, num_sequences, max_pages, longest, num_q_heads, head_dim, group, page_rows, head_rows, kind_rows,
    qk_scale, window, SPLITS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, DESCRIPTOR: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequences = tl.arange(0, BLOCK_B)
    valid = sequences < num_sequences
    begins = tl.load(query_starts_ptr + sequences, mask=valid, other=0)
    lengths = tl.load(query_starts_ptr + sequences + 1, mask=valid, other=0) - begins
    tiles = tl.where((lengths > 1) & (lengths <= longest), (lengths + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    if tile >= total:
        return
    tile = total - 1 - tile  # the last tiles of a sequence see the most keys: they start first
    sequence = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = sequences == sequence
    begin = tl.sum(tl.where(mine, begins, 0), 0)
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    first = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * BLOCK_M  # first query of the tile in its run
    context = tl.load(context_lens_ptr + sequence)
    position = context - length + first  # position of that query

    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    q_offsets = ((begin + rows).to(tl.int64)[:, None] * num_q_heads + head) * head_dim + dims[None, :]
    q_mask = (rows < length)[:, None] & (dims < head_dim)[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    accumulator = tl.zeros([BLOCK_M, D], tl.float32)
    highest = tl.full([BLOCK_M], -1e30, tl.float32)  # of the scaled scores
    total_weight = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # known when the kernel is compiled, which `split` is not
        is_first = split == 0
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        highest = tl.where(is_first, tl.zeros([BLOCK_M], tl.float32) + sink, highest)
        total_weight = tl.where(is_first, tl.full([BLOCK_M], 1.0, tl.float32), total_weight)
    key_rows = tl.arange(0, P)
    head_row = (head // group) * head_rows
    last = tl.minimum(position + BLOCK_M, context)  # keys [0, last) matter to this tile
    table = page_table_ptr + sequence.to(tl.int64) * max_pages
    num_unmasked = (position + 1) // P  # pages that every query of the tile sees whole
    num_pages = tl.cdiv(last, P)
    start = 0  # first page that any query of the tile sees
    if WINDOW:
        start = tl.maximum(position + 1 - window, 0) // P
        num_unmasked = 0
    pages_a_split = tl.cdiv(num_pages - start, SPLITS)
    first_page = start + split * pages_a_split
    last_page = tl.minimum(first_page + pages_a_split, num_pages)
    for index in range(first_page, tl.minimum(num_unmasked, last_page)):
        row = tl.load(table + index) * page_rows + head_row
        keys = _load_rows(kv_ptr, kv_rows, row, head_dim, P, D, DESCRIPTOR)
        scores = tl.dot(q, keys.T, input_precision="ieee")
        new_highest = tl.maximum(highest, tl.max(scores, 1) * qk_scale)
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores * qk_scale - new_highest[:, None])
        total_weight = total_weight * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        values = _load_rows(kv_ptr, kv_rows, row + kind_rows, head_dim, P, D, DESCRIPTOR)
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision="ieee")
        highest = new_highest
    for index in range(tl.maximum(num_unmasked, first_page), last_page):
        row = tl.load(table + index) * page_rows + head_row
        keys = _load_rows(kv_ptr, kv_rows, row, head_dim, P, D, DESCRIPTOR)
        key_positions = index * P + key_rows
        visible = (key_positions[None, :] <= (position + tl.arange(0, BLOCK_M))[:, None]) & (key_positions < context)[
            None, :
        ]
        if WINDOW:
            visible = visible & (key_positions[None, :] > (position - window + tl.arange(0, BLOCK_M))[:, None])
        scores = tl.dot(q, keys.T, input_precision="ieee")
        scores = tl.where(visible, scores * qk_scale, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.where(visible, tl.exp2(scores - new_highest[:, None]), 0.0)
        total_weight = total_weight * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        values = _load_rows(kv_ptr, kv_rows, row + kind_rows, head_dim, P, D, DESCRIPTOR)
        # Rows behind the context hold whatever was there: a weight of zero does not silence a NaN.
        values = tl.where((key_positions < context)[:, None], values, tl.zeros_like(values))
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision="ieee")
        highest = new_highest
    if SPLITS == 1:
        out = accumulator / total_weight[:, None]
        tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        # A row that sees none of these keys weighs exp2(-1e30) = 0 in the merge.
        out = accumulator / tl.maximum(total_weight, 1e-30)[:, None]
        entries = ((begin + rows).to(tl.int64) * num_q_heads + head) * SPLITS + split
        tl.store(partial_ptr + entries[:, None] * head_dim + dims[None, :], out, mask=q_mask)
        tl.store(lse_ptr + entries, highest + tl.log2(tl.maximum(total_weight, 1e-30)), mask=rows < length)


@triton.jit(do_not_specialize=["longest"])
def _merge_splits_kernel(
    partial_ptr, lse_ptr, out_ptr, query_starts_ptr, sequence_ids_ptr, longest, num_q_heads, head_dim,
    SPLITS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequence_ids_ptr + token)
    length = tl.load(query_starts_ptr + sequence + 1) - tl.load(query_starts_ptr + sequence)
    if (length > 1) & (length <= longest):
        splits, dims = tl.arange(0, SPLITS), tl.arange(0, D)
        inside = dims < head_dim
        entries = (token * num_q_heads + head) * SPLITS + splits
        lse = tl.load(lse_ptr + entries)
        weights = tl.exp2(lse - tl.max(lse, 0))
        partial = tl.load(partial_ptr + entries[:, None] * head_dim + dims[None, :], mask=inside[None, :], other=0.0)
        out = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
        offsets = (token * num_q_heads + head) * head_dim + dims
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def row_strides(kv_layer: torch.Tensor) -> tuple[int, int, int]:
    """Strides of page, head and k|v of a layer view [pages, Hkv, 2, P, D], in rows of head_dim values."""
    head_dim = kv_layer.shape[4]
    page, head, kind, token, dim = kv_layer.stride()
    if dim != 1 or token != head_dim or page % head_dim or head % head_dim or kind % head_dim:
        raise ValueError(f"not a layer of a page-major pool: strides {kv_layer.stride()}")
    return page // head_dim, head // head_dim, kind // head_dim


def pool_rows(kv_layer: torch.Tensor) -> torch.Tensor:
    """The layer's memory as a matrix [rows, head_dim] from its first value to its last."""
    pages, heads, kinds, tokens, head_dim = kv_layer.shape
    page, head, kind = row_strides(kv_layer)
    rows = (pages - 1) * page + (heads - 1) * head + (kinds - 1) * kind + tokens
    return kv_layer.as_strided((rows, head_dim), (head_dim, 1))


def num_prefill_splits(num_programs: int, max_context_len: int, page_size: int) -> int:
    """Programs that share a tile's keys: as many as fill the chip, of at least eight pages each; few values in all."""
    most = min(TARGET_PROGRAMS // num_programs, max_context_len // (8 * page_size))
    return 16 if most >= 4 else 4 if most >= 2 else 1


def paged_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor,
    longest: int,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of all sequences with 2 to `longest` new tokens into `out` [T, Hq, D]; other rows stay.

    window, sinks: as in `KernelBackend.paged_attention`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_sequences = batch.context_lens.shape[0]
    block_d = max(triton.next_power_of_2(head_dim), 16)
    use_descriptor = q.is_cuda and q.element_size() == 2 and block_d == head_dim
    block_m = 32
    if q.element_size() == 2 and block_d <= 128:
        block_m = 64 if batch.max_query_len <= 64 else 128
    num_tiles = triton.cdiv(num_tokens, block_m) if num_sequences == 1 else num_tokens // block_m + num_sequences
    span = batch.max_context_len if not window else min(batch.max_context_len, window + block_m)
    splits = num_prefill_splits(num_tiles * num_q_heads, span, batch.page_size)
    partial = lse = out
    if splits > 1:
        partial = torch.empty(num_tokens, num_q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_tokens, num_q_heads, splits, dtype=torch.float32, device=q.device)
    rows = pool_rows(kv_layer)
    descriptor = TensorDescriptor.from_tensor(rows, [batch.page_size, head_dim]) if use_descriptor else None
    group = num_q_heads // kv_layer.shape[1]
    block_b = 16 if num_sequences <= 16 else triton.next_power_of_2(max(num_sequences, 256))
    _paged_prefill_kernel[(num_tiles, num_q_heads, splits)](
        q, out, partial, lse, rows, descriptor, batch.page_table, batch.query_starts, batch.context_lens, sinks,
        num_sequences, batch.page_table.stride(0), longest, num_q_heads, head_dim, group, *row_strides(kv_layer),
        scale * LOG2_E, window, WINDOW=window > 0, SINKS=sinks is not None,
        SPLITS=splits, BLOCK_B=block_b, BLOCK_M=block_m, P=batch.page_size, D=block_d,
        DESCRIPTOR=use_descriptor, num_warps=8 if block_m == 128 else 4, num_stages=3 if use_descriptor else 2,
    )  # fmt: skip
    if splits > 1:
        _merge_splits_kernel[(num_tokens, num_q_heads)](
            partial, lse, out, batch.query_starts, batch.sequence_ids, longest, num_q_heads, head_dim,
            SPLITS=splits, D=block_d, num_warps=2,
        )  # fmt: skip
