"""Qwen3-Next and Qwen3.5: three gated delta nets to one layer of gated attention; a dense MLP or experts."""

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.layer_types import LayerType
from models.layers.decoder import FeedForward
from models.layers.delta_net import DeltaNet, plan_delta_net
from models.layers.gated_attention import GatedAttention, plan_gated_attention
from models.layers.mixed_decoder import MixedDecoder, Mixer, plan_ends
from models.layers.mlp import Mlp, plan_mlp
from models.layers.rope import build_cos_sin
from models.layers.shared_moe import SharedMoe, plan_shared_moe
from models.parallel import TensorParallel
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
    plan = WeightPlan()
    plan_ends(plan, config, sharding)
    for layer in range(config.num_layers):
        is_linear = config.layer_type(layer) is LayerType.LINEAR
        (plan_delta_net if is_linear else plan_gated_attention)(plan, layer, config, sharding)
        (plan_shared_moe if _is_sparse(config, layer) else plan_mlp)(plan, layer, config, sharding)
    return plan


def _is_sparse(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and config.moe.is_sparse(layer)


class Qwen3NextModel(MixedDecoder):
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
            if config.layer_type(layer) is LayerType.LINEAR:
                mixer = DeltaNet(weights, layer, config, sharding, tp, backend)
            else:
                mixer = GatedAttention(weights, layer, config, sharding, tp, backend, cos_sin)
            feed_forward = (SharedMoe if _is_sparse(config, layer) else Mlp)(weights, layer, config, tp, backend)
            layers.append((mixer, feed_forward))
        super().__init__(config, weights, sharding, tp, backend, layers, cos_sin.nbytes)


build_model = Qwen3NextModel
