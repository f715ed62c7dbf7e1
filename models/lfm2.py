"""LFM2: gated short convolutions, and grouped-query attention in some layers."""

import re

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.layer_types import LayerType
from models.layers.attention import Attention, plan_attention
from models.layers.decoder import FeedForward
from models.layers.mixed_decoder import AttentionMixer, MixedDecoder, Mixer, plan_ends
from models.layers.mlp import Mlp, plan_mlp
from models.layers.rope import build_cos_sin
from models.layers.short_conv import ShortConv, plan_short_conv
from models.parallel import TensorParallel
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
    plan = WeightPlan()
    plan_ends(plan, config, sharding)
    for layer in range(config.num_layers):
        is_conv = config.layer_type(layer) is LayerType.SHORT_CONV
        (plan_short_conv if is_conv else plan_attention)(plan, layer, config, sharding)
        plan_mlp(plan, layer, config, sharding)
    return plan


class Lfm2Model(MixedDecoder):
    """One rank's part, on the tensors that `plan_weights` asked for."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
        *,
        device: torch.device,
        max_positions: int,
    ) -> None:
        cos_sin = build_cos_sin(config.rope, max_positions, device)
        layers: list[tuple[Mixer, FeedForward]] = []
        for layer in range(config.num_layers):
            mixer: Mixer
            if config.layer_type(layer) is LayerType.SHORT_CONV:
                mixer = ShortConv(weights, layer, config, tp, backend)
            else:
                mixer = AttentionMixer(Attention(weights, layer, config, sharding, tp, backend, cos_sin), "full")
            layers.append((mixer, Mlp(weights, layer, config, tp, backend)))
        super().__init__(config, weights, sharding, tp, backend, layers, cos_sin.nbytes)


build_model = Lfm2Model
