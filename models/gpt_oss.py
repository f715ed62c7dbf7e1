"""gpt-oss: windows and full attention in turn, learned sinks, and experts with biases and clamped gates."""

import torch

from models.config import ModelConfig
from models.layers.decoder import DecoderModel, plan_decoder
from models.layers.oss_moe import OssMoe, plan_oss_moe
from models.sharding import Sharding
from models.weight_plan import WeightPlan


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """The shared decoder's tensors, and the sinks of this rank's query heads."""
    plan = plan_decoder(config, sharding, sparse=plan_oss_moe)
    heads = (sharding.heads.q_start, sharding.heads.q_end)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.self_attn.sinks"
        plan.add_rows(f"{layer}.sinks", [(name, config.num_q_heads, *heads)], (), torch.float32)
    return plan


class GptOssModel(DecoderModel):
    """The shared decoder with experts of its own."""

    sparse = OssMoe


build_model = GptOssModel
