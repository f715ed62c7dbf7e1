"""Fields of DeepSeek checkpoints: latent attention, and experts in groups with shared ones."""

from dataclasses import replace

from models.config import ExpertScore, MlaConfig, ModelConfig, MoeConfig
from models.errors import ModelError
from models.hf_fields import HfFields
from models.hf_rope import read_rope
from models.layer_types import LayerType


def read_deepseek(fields: HfFields, config: ModelConfig) -> ModelConfig:
    """`config` with what deepseek_v2 and deepseek_v3 have beside the common fields."""
    if fields.get("attention_bias"):
        raise ModelError(f"{fields.where}: biases in latent attention (attention_bias) are not supported yet")
    mla = MlaConfig(
        kv_lora_rank=fields.number("kv_lora_rank"),
        qk_rope_head_dim=fields.number("qk_rope_head_dim"),
        qk_nope_head_dim=fields.number("qk_nope_head_dim"),
        v_head_dim=fields.number("v_head_dim"),
        q_lora_rank=fields.number("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
        is_interleaved=fields.get("rope_interleave") is not False,
    )
    return replace(
        config,
        num_kv_heads=config.num_q_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        rope=read_rope(fields, mla.qk_rope_head_dim),
        layer_types=(LayerType.LATENT,) * config.num_layers,
        mla=mla,
        moe=_read_experts(fields, config),
    )


def _read_experts(fields: HfFields, config: ModelConfig) -> MoeConfig | None:
    if fields.get("n_routed_experts") is None:
        return None
    is_v3 = config.architecture == "DeepseekV3ForCausalLM"
    method = fields.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in (("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")):
        raise ModelError(f"{fields.where}: field 'topk_method': {method!r} is not supported")
    num_dense = min(fields.number("first_k_dense_replace", default=0), config.num_layers)
    inner, is_grouped = fields.number("moe_intermediate_size"), method != "greedy"
    return MoeConfig(
        num_experts=fields.number("n_routed_experts"),
        top_k=fields.number("num_experts_per_tok"),
        intermediate_size=inner,
        norm_topk_prob=is_v3 and fields.get("norm_topk_prob") is not False,
        dense_layers=tuple(range(num_dense)),
        score=ExpertScore.SIGMOID if is_v3 else ExpertScore.SOFTMAX,
        num_groups=fields.number("n_group", default=1) if is_grouped else 1,
        top_groups=fields.number("topk_group", default=1) if is_grouped else 1,
        has_correction=is_v3,
        routed_scale=fields.number("routed_scaling_factor", default=1.0, kind=float),
        shared_intermediate_size=fields.number("n_shared_experts", default=0) * inner,
    )
