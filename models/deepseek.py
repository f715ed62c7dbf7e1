"""DeepSeek-V2 and V3: latent attention; a dense MLP in the first layers, then experts with a shared one."""

import re

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.layers.decoder import FeedForward
from models.layers.latent import LatentAttention, plan_latent
from models.layers.mixed_decoder import MixedDecoder, Mixer, plan_ends
from models.layers.mlp import Mlp, plan_mlp
from models.layers.rope import build_cos_sin
from models.layers.shared_moe import SharedMoe, plan_shared_moe
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def checkpoint_name(config: ModelConfig, name: str) -> str | None:
    """Layers behind the last one predict further tokens: they are not served."""
    found = _LAYER.match(name)
    return None if found and int(found[1]) >= config.num_layers else name


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """Every tensor of this rank."""
    plan = WeightPlan()
    plan_ends(plan, config, sharding)
    for layer in range(config.num_layers):
        plan_latent(plan, layer, config, sharding)
        (plan_shared_moe if _is_sparse(config, layer) else plan_mlp)(plan, layer, config, sharding)
    return plan


def _is_sparse(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and config.moe.is_sparse(layer)


class DeepseekModel(MixedDecoder):
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
            feed_forward = (SharedMoe if _is_sparse(config, layer) else Mlp)(weights, layer, config, tp, backend)
            layers.append((LatentAttention(weights, layer, config, sharding, tp, backend, cos_sin), feed_forward))
        super().__init__(config, weights, sharding, tp, backend, layers, cos_sin.nbytes)


build_model = DeepseekModel
