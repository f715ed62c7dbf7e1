"""DeepSeek-V2 and V3: latent attention; a dense MLP in the first layers, then experts with a shared one."""

import re

import torch

from models.config import ModelConfig
from models.layers.decoder import plan_decoder
from models.layers.latent import LatentAttention, plan_latent
from models.layers.mixed_decoder import MixedDecoder, Mixer
from models.layers.shared_moe import plan_shared_moe
from models.sharding import Sharding
from models.weight_plan import WeightPlan

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def checkpoint_name(config: ModelConfig, name: str) -> str | None:
    """Layers behind the last one predict further tokens: they are not served."""
    found = _LAYER.match(name)
    return None if found and int(found[1]) >= config.num_layers else name


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """Every tensor of this rank."""
    return plan_decoder(config, sharding, sparse=plan_shared_moe, mixer=plan_latent)


class DeepseekModel(MixedDecoder):
    """One rank's part, on the tensors that `plan_weights` asked for."""

    def make_mixer(self, weights: dict[str, torch.Tensor], layer: int, cos_sin: torch.Tensor) -> Mixer:
        return LatentAttention(weights, layer, self.config, self.sharding, self.tp, self.backend, cos_sin)


build_model = DeepseekModel
