"""LFM2: gated short convolutions, and grouped-query attention in some layers."""

import re

import torch

from models.config import ModelConfig
from models.layer_types import LayerType
from models.layers.attention import Attention, plan_attention
from models.layers.decoder import plan_decoder
from models.layers.mixed_decoder import AttentionMixer, MixedDecoder, Mixer
from models.layers.short_conv import ShortConv, plan_short_conv
from models.sharding import Sharding
from models.weight_plan import WeightPlan

_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "model.embedding_norm": "model.norm",
}
_PARTS = re.compile("|".join(map(re.escape, _NAMES)))


def checkpoint_name(config: ModelConfig, name: str) -> str:
    """The names that the shared layers ask for."""
    return _PARTS.sub(lambda match: _NAMES[match[0]], name)


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """Every tensor of this rank."""
    return plan_decoder(config, sharding, mixer=_plan_mixer)


def _plan_mixer(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    is_conv = config.layer_type(layer) is LayerType.SHORT_CONV
    (plan_short_conv if is_conv else plan_attention)(plan, layer, config, sharding)


class Lfm2Model(MixedDecoder):
    """One rank's part, on the tensors that `plan_weights` asked for."""

    def make_mixer(self, weights: dict[str, torch.Tensor], layer: int, cos_sin: torch.Tensor) -> Mixer:
        if self.config.layer_type(layer) is LayerType.SHORT_CONV:
            return ShortConv(weights, layer, self.config, self.tp, self.backend)
        attention = Attention(weights, layer, self.config, self.sharding, self.tp, self.backend, cos_sin)
        return AttentionMixer(attention, "full")


build_model = Lfm2Model
