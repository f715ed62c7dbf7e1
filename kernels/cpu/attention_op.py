"""Rotary embedding with the write into pages, and attention over them."""

import math
from dataclasses import dataclass

import torch

from kernels.cpu.arguments import float_bits
from kernels.cpu.attention import build_attention, slot_bytes
from kernels.cpu.attention_plan import ITEM_BYTES, MAX_ROWS, build_plan, max_slots
from kernels.cpu.rope import build_rope_and_store
from kernels.cpu.runtime import Runtime, check_same_layout, is_bf16
from kernels.interface import AttentionBatch, UnsupportedModelError

_MAX_CHUNKS = 16_000
_NO_WINDOW = 1 << 30
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class BatchWords:
    """The words of a job that a batch gives."""

    pages: tuple[int, int]
    places: tuple[int, int]
    lengths: tuple[int, int]
    num_sequences: int
    num_tokens: int


class AttentionOps:
    """Operations that need to know where tokens lie."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._found: dict[tuple[int, bool], tuple[int, int, int]] = {}
        self._batch: AttentionBatch | None = None
        self._batch_words: BatchWords

    def compile(self, head_dim: int, bf16: bool) -> tuple[int, int, int]:
        """Addresses of (attention, its plan, rope and store)."""
        found = self._found.get((head_dim, bf16))
        if found is None:
            code = "bf16" if bf16 else "f32"
            found = self._found[head_dim, bf16] = (
                self._runtime.kernel(f"attention-{head_dim}-{code}", build_attention) if head_dim % 16 == 0 else 0,
                self._runtime.kernel("attention_plan", build_plan),
                self._runtime.kernel(f"rope_and_store_{code}", build_rope_and_store),
            )
        return found

    def _words_of(self, batch: AttentionBatch) -> "BatchWords":
        """Checked once a step: layers share the batch."""
        if batch is not self._batch:
            _check_batch(batch)
            self._batch_words = BatchWords(
                (batch.page_table.data_ptr(), batch.page_table.stride(0)),
                (batch.positions.data_ptr(), batch.sequence_ids.data_ptr()),
                (batch.query_starts.data_ptr(), batch.context_lens.data_ptr()),
                batch.context_lens.shape[0],
                batch.positions.shape[0],
            )
            self._batch = batch
        return self._batch_words

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
        known = self._words_of(batch)
        num_tokens = qkv.shape[0]
        _, num_kv_heads, _, _, head_dim = kv_layer.shape
        if qkv.shape[1] != (num_q_heads + 2 * num_kv_heads) * head_dim or known.num_tokens != num_tokens:
            raise ValueError(f"qkv {tuple(qkv.shape)} does not fit {num_q_heads} query heads and kv {kv_layer.shape}")
        if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous():
            raise ValueError("cos_sin must be contiguous float32")
        q = torch.empty((num_tokens, num_q_heads, head_dim), dtype=qkv.dtype)
        per_chunk = max(8, self._runtime.chunk_size(num_tokens, 1))
        words = (
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            *_pool_words(kv_layer, qkv.dtype),
            *known.pages,
            *known.places,
            q.data_ptr(),
            num_tokens,
            num_q_heads,
            num_kv_heads,
            head_dim,
            cos_sin.shape[1] // 2,
            batch.page_size,
            q_norm.data_ptr() if q_norm is not None else 0,
            k_norm.data_ptr() if k_norm is not None else 0,
            float_bits(eps),
            per_chunk,
        )
        self._runtime.run(self.compile(head_dim, bf16)[2], 0, -(-num_tokens // per_chunk), words)
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelBackend.paged_attention`."""
        runtime, bf16 = self._runtime, is_bf16(q)
        num_tokens, num_q_heads, head_dim = q.shape
        num_kv_heads, group = kv_layer.shape[1], num_q_heads // kv_layer.shape[1]
        check_same_layout(q, q)
        known = self._words_of(batch)
        check_attention(head_dim, batch.page_size, group)
        if sinks is not None and (sinks.dtype is not torch.float32 or sinks.shape != (num_q_heads,)):
            raise ValueError(f"sinks must be float32 of {num_q_heads} query heads, got {sinks.dtype} {sinks.shape}")
        if known.num_tokens != num_tokens:
            raise ValueError(f"{num_tokens} queries for a batch of {known.num_tokens} tokens")
        out = torch.empty(q.shape, dtype=q.dtype)
        num_sequences = known.num_sequences
        tokens_per_item = MAX_ROWS // group
        slots = max_slots(runtime.num_threads)
        max_items = (num_sequences + num_tokens // tokens_per_item) * num_kv_heads + slots
        body, plan, _ = self.compile(head_dim, bf16)
        words = (
            q.data_ptr(),
            *_pool_words(kv_layer, q.dtype),
            *known.pages,
            *known.lengths,
            out.data_ptr(),
            num_sequences,
            num_kv_heads,
            group,
            batch.page_size,
            float_bits(scale * _LOG2_E),
            window or _NO_WINDOW,
            0 if sinks is None else sinks.data_ptr(),
            runtime.scratch("items", max_items * ITEM_BYTES),
            runtime.scratch("counters", slots * 8),
            runtime.scratch("workspace", slots * slot_bytes(head_dim)),
            tokens_per_item,
            runtime.num_threads,
            -(-max_items // _MAX_CHUNKS),
            0,  # items, written by the plan, as is the number of chunks
        )
        runtime.run(body, plan, 0, words, is_long=num_tokens > num_sequences)
        return out


def check_attention(head_dim: int, page_size: int, heads_per_kv: int) -> None:
    """Raises UnsupportedModelError for shapes that the kernel does not take."""
    if head_dim % 16 or page_size % 16 or not 1 <= heads_per_kv <= MAX_ROWS:
        raise UnsupportedModelError(
            f"attention on the CPU needs a head_dim and a page size in multiples of 16, and at most {MAX_ROWS} query "
            f"heads a kv head; the model has {head_dim}, {page_size} and {heads_per_kv}"
        )


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
