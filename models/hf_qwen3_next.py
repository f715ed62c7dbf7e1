"""Fields of Qwen3-Next and Qwen3.5 checkpoints: gated delta nets between layers of full attention."""

from dataclasses import replace

from models.config import LinearAttentionConfig, ModelConfig, MoeConfig
from models.errors import ModelError
from models.hf_fields import HfFields
from models.hf_rope import read_rope
from models.layer_types import LayerType

_DEFAULT_INTERVAL, _DEFAULT_ROTATED = 4, 0.25
_TYPES = {"linear_attention": LayerType.LINEAR, "full_attention": LayerType.FULL}


def read_qwen3_next(fields: HfFields, config: ModelConfig) -> ModelConfig:
    """`config` with what qwen3_next and qwen3_5 have beside the common fields."""
    if fields.get("attention_bias"):
        raise ModelError(f"{fields.where}: biases in gated attention (attention_bias) are not supported yet")
    linear = LinearAttentionConfig(
        num_k_heads=fields.number("linear_num_key_heads"),
        num_v_heads=fields.number("linear_num_value_heads"),
        k_head_dim=fields.number("linear_key_head_dim"),
        v_head_dim=fields.number("linear_value_head_dim"),
        conv_kernel=fields.number("linear_conv_kernel_dim", default=4),
        is_by_head=config.architecture == "Qwen3NextForCausalLM",
    )
    if min(linear.num_k_heads, linear.k_head_dim, linear.v_head_dim, linear.conv_kernel - 1) < 1:
        raise ModelError(f"{fields.where}: sizes of the linear attention must be positive")
    if linear.num_v_heads < 1 or linear.num_v_heads % linear.num_k_heads:
        heads = f"{linear.num_k_heads} key heads cannot be shared evenly by {linear.num_v_heads} value heads"
        raise ModelError(f"{fields.where}: {heads}")
    head_dim = fields.number("head_dim", default=256)
    with_default = {"partial_rotary_factor": _DEFAULT_ROTATED, **fields.data}
    return replace(
        config,
        head_dim=head_dim,
        rope=read_rope(HfFields(with_default, fields.where), head_dim),
        qk_norm=True,
        norm_offset=1.0,
        layer_types=_layer_types(fields, config.num_layers),
        linear_attention=linear,
        moe=_read_experts(fields, config),
    )


def _layer_types(fields: HfFields, num_layers: int) -> tuple[LayerType, ...]:
    names = fields.get("layer_types")
    if names is None:
        interval = fields.number("full_attention_interval", default=_DEFAULT_INTERVAL)
        if interval < 1:
            raise ModelError(f"{fields.where}: field 'full_attention_interval' must be positive")
        return tuple(LayerType.LINEAR if (i + 1) % interval else LayerType.FULL for i in range(num_layers))
    if not isinstance(names, list) or len(names) != num_layers or any(name not in _TYPES for name in names):
        raise ModelError(f"{fields.where}: field 'layer_types' must name {' or '.join(_TYPES)} for every layer")
    return tuple(_TYPES[name] for name in names)


def _read_experts(fields: HfFields, config: ModelConfig) -> MoeConfig | None:
    if not fields.get("num_experts"):
        return None
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"{fields.where}: field 'mlp_only_layers' must hold layer numbers, not {dense!r}")
    return MoeConfig(
        num_experts=fields.number("num_experts"),
        top_k=fields.number("num_experts_per_tok"),
        intermediate_size=fields.number("moe_intermediate_size"),
        norm_topk_prob=fields.get("norm_topk_prob") is not False,
        sparse_step=fields.number("decoder_sparse_step", default=1),
        dense_layers=tuple(dense),
        shared_intermediate_size=fields.number("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
