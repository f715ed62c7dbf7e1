"""Fields of gpt-oss checkpoints: experts with a clamped gate, whose weights may be MXFP4 blocks."""

from dataclasses import replace

from models.config import ModelConfig, MoeConfig
from models.errors import ModelError
from models.hf_fields import HfFields


def read_gpt_oss(fields: HfFields, config: ModelConfig) -> ModelConfig:
    """`config` with what gpt_oss has beside the common fields."""
    quantization = fields.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") != "mxfp4":
        raise ModelError(f"{fields.where}: checkpoints quantized by {quantization.get('quant_method')!r}")
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", "num_experts"),
        top_k=fields.number("num_experts_per_tok", "experts_per_token"),
        intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        limit=fields.number("swiglu_limit", default=7.0, kind=float),
        gate_slope=fields.number("swiglu_alpha", default=1.702, kind=float),
    )
    has_bias = fields.data.get("attention_bias", True) is not False
    return replace(config, moe=moe, attention_bias=has_bias, attention_out_bias=has_bias)
