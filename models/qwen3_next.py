"""Qwen3-Next and Qwen3.5: three gated delta nets to one layer of gated attention; a dense MLP or experts."""

import torch

from models.config import ModelConfig
from models.layer_types import LayerType
from models.layers.decoder import plan_decoder
from models.layers.delta_net import DeltaNet, plan_delta_net
from models.layers.gated_attention import GatedAttention, plan_gated_attention
from models.layers.mixed_decoder import MixedDecoder, Mixer
from models.layers.shared_moe import plan_shared_moe
from models.sharding import Sharding
from models.weight_plan import WeightPlan

_NOT_SERVED = ("mtp.", "model.visual.")
_TEXT = "model.language_model."


def checkpoint_name(config: ModelConfig, name: str) -> str | None:
    """Layers that predict further tokens, and those that see images, are not served."""
    if name.startswith(_NOT_SERVED):
        return None
    return f"model.{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """Every tensor of this rank."""
    return plan_decoder(config, sharding, sparse=plan_shared_moe, mixer=_plan_mixer)


def _plan_mixer(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    is_linear = config.layer_type(layer) is LayerType.LINEAR
    (plan_delta_net if is_linear else plan_gated_attention)(plan, layer, config, sharding)


class Qwen3NextModel(MixedDecoder):
    """One rank's part, on the tensors that `plan_weights` asked for."""

    def make_mixer(self, weights: dict[str, torch.Tensor], layer: int, cos_sin: torch.Tensor) -> Mixer:
        if self.config.layer_type(layer) is LayerType.LINEAR:
            return DeltaNet(weights, layer, self.config, self.sharding, self.tp, self.backend)
        return GatedAttention(weights, layer, self.config, self.sharding, self.tp, self.backend, cos_sin)


build_model = Qwen3NextModel
