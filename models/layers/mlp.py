"""Gated feed-forwards (Shazeer 2020), on this rank's columns."""

import torch
import torch.nn.functional as F

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan


def plan_mlp(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """Fused gate and up rows, and down columns, of this rank's part of the intermediate dimension."""
    norm = f"model.layers.{layer}.post_attention_layernorm.weight"
    plan.add_whole(f"{layer}.mlp_norm", norm, (config.hidden_size,), offset=config.norm_offset)
    _plan_matrices(plan, layer, config, sharding)


def plan_gelu_mlp(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """The same between two norms."""
    prefix, shape = f"model.layers.{layer}", (config.hidden_size,)
    plan.add_whole(f"{layer}.mlp_norm", f"{prefix}.pre_feedforward_layernorm.weight", shape, offset=config.norm_offset)
    _plan_matrices(plan, layer, config, sharding)
    plan.add_whole(
        f"{layer}.mlp_post_norm", f"{prefix}.post_feedforward_layernorm.weight", shape, offset=config.norm_offset
    )


def _plan_matrices(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    prefix, hidden, inner = f"model.layers.{layer}", config.hidden_size, config.intermediate_size
    parts = [(f"{prefix}.mlp.{name}.weight", inner, *sharding.mlp) for name in ("gate_proj", "up_proj")]
    plan.add_rows(f"{layer}.gate_up", parts, (hidden,))
    plan.add_columns(f"{layer}.down", f"{prefix}.mlp.down_proj.weight", (hidden, inner), *sharding.mlp)


class Mlp:
    """x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        self.norm = weights[f"{layer}.mlp_norm"]
        self.gate_up = weights[f"{layer}.gate_up"]
        self.down = weights[f"{layer}.down"]
        self.eps = config.rms_norm_eps
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor) -> None:
        """x [T, H] in place."""
        backend = self.backend
        inner = backend.norm_gate_up(x, self.norm, self.eps, self.gate_up)
        if self.tp.size == 1:
            backend.linear_residual(inner, self.down, x)
        else:
            x += self.tp.all_reduce(backend.linear(inner, self.down))


class GeluMlp(Mlp):
    """x += post_norm(down(gelu(gate(norm(x))) * up(norm(x)))), with the tanh form of gelu (gemma)."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        super().__init__(weights, layer, config, tp, backend)
        self.post_norm = weights[f"{layer}.mlp_post_norm"]

    def forward(self, x: torch.Tensor) -> None:
        """x [T, H] in place."""
        backend = self.backend
        gate, up = backend.norm_linear(x, self.norm, self.eps, self.gate_up).float().chunk(2, dim=-1)
        inner = (F.gelu(gate, approximate="tanh") * up).to(self.down.dtype)
        added = self.tp.all_reduce(backend.linear(inner, self.down))
        x += backend.rms_norm(added, self.post_norm, self.eps)
