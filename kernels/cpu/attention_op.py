"""Rotary embedding with the write into pages, and attention over them."""

import math

import torch

from kernels.cpu.arguments import float_bits
from kernels.cpu.attention import build_attention, slot_bytes
from kernels.cpu.attention_plan import ITEM_BYTES, MAX_ROWS, build_plan, max_slots
from kernels.cpu.rope import build_rope_and_store
from kernels.cpu.runtime import Runtime, check_same_layout, is_bf16
from kernels.interface import AttentionBatch

_MAX_CHUNKS = 16_000


class AttentionOps:
    """Operations that need to know where tokens lie."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attention: dict[tuple[int, bool], int] = {}
        self._rope: dict[bool, int] = {}

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        num_q_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See `KernelBackend.rope_and_store`."""
        bf16 = is_bf16(qkv)
        check_same_layout(qkv, qkv, q_norm, k_norm)
        _check_batch(batch)
        num_tokens = qkv.shape[0]
        _, num_kv_heads, _, _, head_dim = kv_layer.shape
        if qkv.shape[1] != (num_q_heads + 2 * num_kv_heads) * head_dim or batch.positions.shape[0] != num_tokens:
            raise ValueError(f"qkv {tuple(qkv.shape)} does not fit {num_q_heads} query heads and kv {kv_layer.shape}")
        if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous():
            raise ValueError("cos_sin must be contiguous float32")
        q = qkv.new_empty((num_tokens, num_q_heads, head_dim))
        body = self._rope.get(bf16)
        if body is None:
            name = f"rope_and_store_{'bf16' if bf16 else 'f32'}"
            body = self._rope[bf16] = self._runtime.kernel(name, build_rope_and_store)
        per_chunk = max(8, self._runtime.chunk_size(num_tokens, 1))
        self._runtime.run(
            body,
            0,
            -(-num_tokens // per_chunk),
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            *_pool_words(kv_layer, qkv.dtype),
            batch.page_table.data_ptr(),
            batch.page_table.stride(0),
            batch.positions.data_ptr(),
            batch.sequence_ids.data_ptr(),
            q.data_ptr(),
            num_tokens,
            num_q_heads,
            num_kv_heads,
            head_dim,
            cos_sin.shape[1] // 2,
            batch.page_size,
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            float_bits(eps),
            per_chunk,
        )
        return q

    def paged_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """See `KernelBackend.paged_attention`."""
        runtime, bf16 = self._runtime, is_bf16(q)
        num_tokens, num_q_heads, head_dim = q.shape
        num_kv_heads, group = kv_layer.shape[1], num_q_heads // kv_layer.shape[1]
        check_same_layout(q, q)
        _check_batch(batch)
        if head_dim % 16 or batch.page_size % 16 or not 1 <= group <= MAX_ROWS:
            raise ValueError(
                f"attention needs head_dim and page_size in multiples of 16 and at most {MAX_ROWS} query heads a kv "
                f"head, got {head_dim}, {batch.page_size} and {group}"
            )
        out = torch.empty_like(q)
        num_sequences = batch.context_lens.shape[0]
        tokens_per_item = MAX_ROWS // group
        slots = max_slots(runtime.num_threads)
        max_items = (num_sequences + num_tokens // tokens_per_item) * num_kv_heads + slots
        key = (head_dim, bf16)
        body = self._attention.get(key)
        if body is None:
            name = f"attention-{head_dim}-{'bf16' if bf16 else 'f32'}"
            body = self._attention[key] = runtime.kernel(name, build_attention)
        runtime.run(
            body,
            runtime.kernel("attention_plan", build_plan),
            0,  # the plan sets it
            q.data_ptr(),
            *_pool_words(kv_layer, q.dtype),
            batch.page_table.data_ptr(),
            batch.page_table.stride(0),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            out.data_ptr(),
            num_sequences,
            num_kv_heads,
            group,
            batch.page_size,
            float_bits(scale * math.log2(math.e)),
            runtime.scratch("items", max_items * ITEM_BYTES),
            runtime.scratch("counters", slots * 8),
            runtime.scratch("workspace", slots * slot_bytes(head_dim)),
            tokens_per_item,
            runtime.num_threads,
            -(-max_items // _MAX_CHUNKS),
            0,
            is_long=num_tokens > num_sequences,
        )
        return out


def _pool_words(kv_layer: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Address and byte strides of (page, kv head, key to value, token)."""
    size = kv_layer.element_size()
    page, head, value, token, dim = kv_layer.stride()
    if kv_layer.dtype is not dtype or dim != 1:
        raise ValueError(f"kv_layer must be {dtype} with contiguous rows, got {kv_layer.dtype} and stride {dim}")
    return kv_layer.data_ptr(), page * size, head * size, value * size, token * size


def _check_batch(batch: AttentionBatch) -> None:
    """Kernels read these as plain arrays; a wrong dtype would read elsewhere."""
    int32 = torch.int32
    if not (
        batch.query_starts.dtype is int32
        and batch.context_lens.dtype is int32
        and batch.page_table.dtype is int32
        and batch.sequence_ids.dtype is int32
        and batch.positions.dtype is torch.int64
        and batch.page_table.stride(1) == 1
    ):
        raise ValueError("AttentionBatch needs int32 tensors (int64 positions) and contiguous page table rows")
