"""What one layer of each type keeps between tokens. A family with a new type of layer enters it here, and only here.

Pure Python. The functions read nothing but the model's config.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.layer_types import LayerType
from models.state_groups import HitPolicy, Leaf, ShardKind, StateKind

if TYPE_CHECKING:
    from models.config import ModelConfig


@dataclass(frozen=True)
class GroupRule:
    """Which group a state belongs to, and how a prefix of that group is usable."""

    name: str
    kind: StateKind
    hit_policy: HitPolicy
    window_tokens: int = 0


FULL = GroupRule("full", StateKind.FULL, HitPolicy.ALL_PAGES)
RECURRENT = GroupRule("recurrent", StateKind.BOUNDED, HitPolicy.EXACT_CHECKPOINT)
TAIL = GroupRule("tail", StateKind.TAIL, HitPolicy.EXACT_CHECKPOINT)


def window_rule(window: int) -> GroupRule:
    """The group of layers whose queries see `window` keys, their own among them: window - 1 before a boundary."""
    return GroupRule("window", StateKind.BOUNDED, HitPolicy.TRAILING_PAGES, window - 1)


@dataclass(frozen=True)
class LayerState:
    """One tensor that a layer keeps; the fields are those of `Leaf`. Layers with equal ones share a leaf."""

    group: GroupRule
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_heads: int = 0  # 0: replicated
    tokens_per_row: int = 1
    is_scratch: bool = False

    def leaf(self, layers: tuple[int, ...]) -> Leaf:
        """The leaf of `layers`."""
        shard = ShardKind.HEAD if self.num_heads else ShardKind.REPLICATED
        heads = max(1, self.num_heads)
        return Leaf(self.name, layers, self.shape, self.dtype, shard, heads, self.tokens_per_row, self.is_scratch)


def layer_states(config: "ModelConfig", layer: int, dtype: str) -> list[LayerState]:
    """What `layer` keeps, with caches in `dtype`; recurrent states and compressor rows are float32 whatever it is."""
    return _STATES[config.layer_type(layer)](config, dtype)


def _full(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """Keys (after norm and rotation) and values of all tokens."""
    return [LayerState(FULL, "kv", (2, config.head_dim), dtype, config.num_kv_heads)]


def _window(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """The same, of the tokens that a window still reaches."""
    return [LayerState(window_rule(config.window), "kv", (2, config.head_dim), dtype, config.num_kv_heads)]


def _latent(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """Multi-head latent attention: [latent after its norm | rotated key part] of each token; an indexer's key beside
    it."""
    mla = config.mla
    states = [LayerState(FULL, "latent", (mla.kv_lora_rank + mla.qk_rope_head_dim,), dtype)]
    if mla.index_head_dim:
        states.append(LayerState(FULL, "index", (mla.index_head_dim,), dtype))
    return states


def _linear(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """Gated delta net: by key head the states of its value heads, and the last inputs of q's, k's and v's
    convolution."""
    linear = config.linear_attention
    heads, shared = linear.num_k_heads, linear.num_v_heads // linear.num_k_heads
    columns = linear.conv_kernel - 1
    recurrent = (shared, linear.k_head_dim, linear.v_head_dim)
    return [
        LayerState(RECURRENT, "recurrent", recurrent, "float32", heads),
        LayerState(RECURRENT, "conv_q", (linear.k_head_dim, columns), dtype, heads),
        LayerState(RECURRENT, "conv_k", (linear.k_head_dim, columns), dtype, heads),
        LayerState(RECURRENT, "conv_v", (shared * linear.v_head_dim, columns), dtype, heads),
    ]


def _short_conv(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """The last inputs of a convolution, in as many parts as there are query heads: they can go to as many ranks."""
    channels = config.hidden_size // config.num_q_heads
    return [LayerState(RECURRENT, "conv", (channels, config.conv_kernel - 1), dtype, config.num_q_heads)]


def _shared_window(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """One vector a token that is key and value of all heads, of the tokens that the window reaches."""
    return [LayerState(window_rule(config.window), "kv", (config.head_dim,), dtype)]


def _compressed(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """Window, an entry and an indexer's key for `ratio` tokens, and what compressors have read of unfinished ones:
    by channel the greatest gate, the sum of weights and the weighted sum of values, in float32.

    overlap: of the entry that is next, which looks at the last `ratio` tokens already. partial: of the one after it.
    """
    ratio, index = config.compression.ratio, config.compression.index_head_dim
    dim = config.head_dim
    return [
        *_shared_window(config, dtype),
        LayerState(FULL, "compressed", (dim,), dtype, tokens_per_row=ratio),
        LayerState(FULL, "compressed_index", (index,), dtype, tokens_per_row=ratio),
        LayerState(TAIL, "overlap", (3, dim), "float32"),
        LayerState(TAIL, "index_overlap", (3, index), "float32"),
        LayerState(TAIL, "partial", (3, dim), "float32", is_scratch=True),
        LayerState(TAIL, "index_partial", (3, index), "float32", is_scratch=True),
    ]


def _heavily_compressed(config: "ModelConfig", dtype: str) -> list[LayerState]:
    """Window, one entry for `heavy_ratio` tokens, and what has been read of the next one."""
    ratio, dim = config.compression.heavy_ratio, config.head_dim
    return [
        *_shared_window(config, dtype),
        LayerState(FULL, "heavily_compressed", (dim,), dtype, tokens_per_row=ratio),
        LayerState(TAIL, "heavy_partial", (3, dim), "float32", is_scratch=True),
    ]


_STATES: dict[LayerType, Callable[["ModelConfig", str], list[LayerState]]] = {
    LayerType.FULL: _full,
    LayerType.WINDOW: _window,
    LayerType.LATENT: _latent,
    LayerType.LINEAR: _linear,
    LayerType.SHORT_CONV: _short_conv,
    LayerType.SHARED_WINDOW: _shared_window,
    LayerType.COMPRESSED: _compressed,
    LayerType.HEAVILY_COMPRESSED: _heavily_compressed,
}
