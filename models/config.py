"""What the engine knows of a model: plain numbers, read once from the checkpoint's own description.

`models/config_hf.py` (with `hf_*.py`) and `models/config_gguf.py` are the only readers of field names of transformers
and of GGUF.
Free of torch: launcher, router and HTTP processes read it too.
"""

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from models.errors import ModelError
from models.layer_types import LayerType
from models.source import ModelSource


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    rope_type: default, linear, llama3 or yarn. rotary_dim: dimensions of a head that are rotated.
    frequency_factors: divisors of each of the rotary_dim / 2 frequencies (GGUF keeps llama3 scaling in this form).
    original_context is 0 where the type has no use for it; attention_factor None means the type's own formula.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


class ExpertScore(Enum):
    """What a router makes of its logits: SQRT_SOFTPLUS is sqrt(log(1 + e^x))."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: layer i has experts if it is not in dense_layers and (i + 1) % sparse_step == 0.

    num_groups, top_groups: experts are chosen out of the best top_groups of num_groups equal ranges. has_correction: a
    bias by expert is added for choosing alone. routed_scale: factor on the weights of chosen experts.
    shared_intermediate_size: of an expert for all tokens (0: none), which a gate of its own weights if has_shared_gate.
    limit: bound on the pre-activations of experts. gate_slope: factor on the gate within its sigmoid. hash_layers:
    those whose experts are looked up by token id.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    score: ExpertScore = ExpertScore.SOFTMAX
    num_groups: int = 1
    top_groups: int = 1
    has_correction: bool = False
    routed_scale: float = 1.0
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    limit: float | None = None
    gate_slope: float = 1.0
    hash_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts instead of one dense MLP."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2). q_lora_rank None: queries are projected directly.

    is_interleaved: whether the rotation turns neighbouring pairs of dimensions, or those of the two halves.
    index_head_dim: of a lightning indexer's keys, 0 without one.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    is_interleaved: bool = True
    index_head_dim: int = 0


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Gated delta net: num_v_heads is a multiple of num_k_heads. conv_kernel: taps of the short convolution.
    is_by_head: whether the checkpoint's projections hold q, k, v and gate of one key head after another.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int
    is_by_head: bool = False


@dataclass(frozen=True)
class CompressionConfig:
    """Compressed attention (DeepSeek-V4). ratio, heavy_ratio: tokens that an entry of COMPRESSED and of
    HEAVILY_COMPRESSED layers stands for; their rotation is `rope`. An indexer of index_heads chooses index_top_k
    entries. Queries come from q_lora_rank dimensions; the output goes through output_rank of each of output_groups.
    """

    ratio: int
    heavy_ratio: int
    index_head_dim: int
    index_heads: int = 1
    index_top_k: int = 1
    q_lora_rank: int = 1
    output_groups: int = 1
    output_rank: int = 1
    rope: RopeConfig | None = None


@dataclass(frozen=True)
class HyperConnectionConfig:
    """A residual of several streams, mixed by matrices whose rows and columns sum to 1 after so many iterations."""

    num_streams: int
    num_iterations: int
    eps: float


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and constants.

    architecture: name as transformers gives it. family: the module of this package that implements it. attention_bias,
    attention_out_bias: biases of the q, k and v, and of the output projection. dtype: the checkpoint's own (float32,
    bfloat16 or float16). eos_token_ids: every id that ends a turn. layer_types: of each layer; empty where all are
    FULL. window: keys that a query of a layer with a window sees, its own among them (0 without such layers);
    window_rope: their rotation where it is another one. query_scale: factor on query times key; None means head_dim **
    -0.5. norm_offset: is added to the norm weights of the checkpoint.
    embedding_scale: factor on embeddings. conv_kernel: taps of short convolutions.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    layer_types: tuple[LayerType, ...] = ()
    window: int = 0
    window_rope: RopeConfig | None = None
    query_scale: float | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    conv_kernel: int = 0
    mla: MlaConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    compression: CompressionConfig | None = None
    hyper_connections: HyperConnectionConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts instead of one dense MLP."""
        return self.moe is not None and self.moe.is_sparse(layer)

    def layer_type(self, layer: int) -> LayerType:
        """How `layer` mixes tokens."""
        return self.layer_types[layer] if self.layer_types else LayerType.FULL

    def to_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, numbers, strings, None) that `from_dict` takes back."""
        return msgspec.to_builtins(asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """The config that `to_dict` wrote; ModelError if the data has another form."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"model config: {error}") from error


def load_model_config(source: ModelSource) -> ModelConfig:
    """Read the config of `source`; ModelError names the field or architecture that is missing or unsupported."""
    if Path(source.path).suffix == ".gguf":
        from models.config_gguf import read_gguf_config

        return read_gguf_config(Path(source.path))
    from models.config_hf import read_hf_config

    return read_hf_config(Path(source.path))


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


def check_config(config: ModelConfig, where: str) -> ModelConfig:
    """Raise ModelError on numbers that no model can have; returns `config`."""
    for name in _POSITIVE:
        if getattr(config, name) <= 0:
            raise ModelError(f"{where}: {name} must be positive, not {getattr(config, name)}")
    if config.rope.theta <= 0 or config.rope.factor <= 0:
        raise ModelError(f"{where}: theta and factor of the rotary embedding must be positive")
    if config.rope.rope_type in ("llama3", "yarn") and config.rope.original_context < 1:
        raise ModelError(f"{where}: the original context of the rotary embedding must be positive")
    if config.num_q_heads % config.num_kv_heads:
        raise ModelError(
            f"{where}: {config.num_q_heads} query heads cannot be shared evenly by {config.num_kv_heads} kv heads"
        )
    if config.head_dim < 2 or config.head_dim % 2 or not 0 < config.rope.rotary_dim <= config.head_dim:
        raise ModelError(f"{where}: head_dim {config.head_dim} does not suit rotary embeddings")
    if config.layer_types and len(config.layer_types) != config.num_layers:
        raise ModelError(f"{where}: types of {len(config.layer_types)} layers for {config.num_layers} layers")
    if config.window < 1 and LayerType.WINDOW in config.layer_types:
        raise ModelError(f"{where}: layers have a sliding window, but its size is missing")
    if config.moe is not None and min(config.moe.intermediate_size, config.moe.sparse_step) < 1:
        raise ModelError(f"{where}: intermediate size and step of the experts must be positive")
    if config.moe is not None and config.moe.num_experts % config.moe.num_groups:
        raise ModelError(f"{where}: {config.moe.num_experts} experts make no {config.moe.num_groups} equal groups")
    if config.moe is not None and not 0 < config.moe.top_groups <= config.moe.num_groups:
        raise ModelError(f"{where}: {config.moe.top_groups} of {config.moe.num_groups} groups of experts is impossible")
    if config.moe is not None and not 0 < config.moe.top_k <= config.moe.num_experts:
        raise ModelError(f"{where}: {config.moe.top_k} of {config.moe.num_experts} experts a token is impossible")
    return config
