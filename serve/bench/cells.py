"""What a cell of the static benchmark must move and compute, counted from the model's config alone.

The limit of a cell is the sum over its operations of max(bytes / read bandwidth, FLOPs / peak). Weights are read once
a cell, keys and values once a sequence; the embedding is a lookup, and the head runs on last tokens only. Norms,
activations and what is written are left out: no kernel could be faster than this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from models.config import ModelConfig
from models.state_layout import DTYPE_BYTES


class Phase(Enum):
    """PREFILL computes prompts up to their first token; DECODE computes one token a sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Cell:
    """`batch` sequences of `context` tokens, of which `cached` tokens are in the pool already.

    PREFILL computes context - cached tokens of each sequence; DECODE computes the last of the context's tokens.
    """

    phase: Phase
    batch: int
    context: int
    cached: int

    @property
    def new_tokens(self) -> int:
        """Tokens computed for each sequence."""
        return 1 if self.phase is Phase.DECODE else self.context - self.cached


@dataclass(frozen=True)
class Operation:
    """Bytes that an operation reads, and its floating-point operations."""

    name: str
    num_bytes: float
    flops: float


@dataclass(frozen=True)
class HardwareLimits:
    """What the machine can do, as measured: bytes read a second and FLOPs of a large matmul a second."""

    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, operations: Sequence[Operation]) -> float:
        """The least time that the operations take one after another."""
        return sum(max(o.num_bytes / self.read_bytes_per_s, o.flops / self.flops_per_s) for o in operations)


def cached_tokens(context: int, hit_rate: float, page_size: int) -> int:
    """Tokens of a prompt that a hit rate stands for: whole pages, and never the last token."""
    pages = min(int(context * hit_rate) // page_size, (context - 1) // page_size)
    return pages * page_size


def operations(config: ModelConfig, cell: Cell, dtype: str) -> list[Operation]:
    """All operations of a cell; those of equal shape in all layers are one entry each.

    Layers run one after another, so that summing over layers first changes nothing.
    """
    size = DTYPE_BYTES[dtype]
    tokens = cell.batch * cell.new_tokens
    q_dim, kv_dim = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, layers = config.hidden_size, config.num_layers
    return [
        _linear("qkv", layers * hidden * (q_dim + 2 * kv_dim), tokens, size),
        _attention(config, cell, size),
        _linear("output", layers * q_dim * hidden, tokens, size),
        *_feed_forward(config, tokens, size),
        _linear("head", hidden * config.vocab_size, cell.batch, size),
    ]


def _linear(name: str, num_weights: int, tokens: int, size: int) -> Operation:
    return Operation(name, num_weights * size, 2.0 * num_weights * tokens)


def _attention(config: ModelConfig, cell: Cell, size: int) -> Operation:
    """New token i of a sequence (from 1) sees the tokens before it and itself: context - new + i keys."""
    new = cell.new_tokens
    seen = cell.batch * (new * (cell.context - new) + new * (new + 1) // 2)
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * size * cell.context * cell.batch
    flops = 4.0 * config.num_q_heads * config.head_dim * seen
    return Operation("attention", config.num_layers * kv_bytes, config.num_layers * flops)


def _feed_forward(config: ModelConfig, tokens: int, size: int) -> list[Operation]:
    hidden, moe = config.hidden_size, config.moe
    num_sparse = sum(moe.is_sparse(layer) for layer in range(config.num_layers)) if moe is not None else 0
    num_dense = config.num_layers - num_sparse
    ops = []
    if num_dense:
        ops.append(_linear("gate_up", num_dense * hidden * 2 * config.intermediate_size, tokens, size))
        ops.append(_linear("down", num_dense * config.intermediate_size * hidden, tokens, size))
    if moe is not None and num_sparse:
        expert = 3 * hidden * moe.intermediate_size
        # Distinct experts that tokens of even routing touch, on average.
        touched = moe.num_experts * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens)
        flops = 2.0 * expert * moe.top_k * tokens
        ops.append(_linear("router", num_sparse * hidden * moe.num_experts, tokens, size))
        ops.append(Operation("experts", num_sparse * touched * expert * size, num_sparse * flops))
    return ops
