"""Gemma 3, text only: windows and full attention with rotations of their own, and norms before and behind each half."""

from models.config import ModelConfig
from models.layers.decoder import DecoderModel, plan_decoder
from models.layers.mlp import GeluMlp, plan_gelu_mlp
from models.sharding import Sharding
from models.weight_plan import WeightPlan


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """The shared decoder's tensors, and the norms behind attention."""
    plan = plan_decoder(config, sharding, dense=plan_gelu_mlp)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.post_attention_layernorm.weight"
        plan.add_whole(f"{layer}.attn_post_norm", name, (config.hidden_size,), offset=config.norm_offset)
    return plan


class Gemma3Model(DecoderModel):
    """The shared decoder with gemma's feed-forward."""

    dense = GeluMlp


build_model = Gemma3Model
