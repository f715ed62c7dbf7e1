"""Experts of gpt-oss: biases, gate and up columns in turn, a clamped gate; every rank has a part of every expert."""

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import Piece, WeightPlan


def plan_oss_moe(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """The router, and of all experts the columns (gate and up next to each other) and rows of this rank."""
    moe, hidden, prefix = config.moe, config.hidden_size, f"model.layers.{layer}"
    start, stop = sharding.expert
    experts, width, inner = f"{prefix}.mlp.experts", stop - start, moe.intermediate_size
    gate_up, down = (moe.num_experts, hidden, 2 * inner), (moe.num_experts, inner, hidden)
    plan.add_whole(f"{layer}.mlp_norm", f"{prefix}.post_attention_layernorm.weight", (hidden,))
    plan.add_whole(f"{layer}.router", f"{prefix}.mlp.router.weight", (moe.num_experts, hidden))
    plan.add_whole(f"{layer}.router_bias", f"{prefix}.mlp.router.bias", (moe.num_experts,))
    plan.add_experts(
        f"{layer}.gate_up",
        (moe.num_experts, hidden, 2 * width),
        [Piece(f"{experts}.gate_up_proj", gate_up, 2, 2 * start, 2 * stop)],
    )
    plan.add_experts(
        f"{layer}.down", (moe.num_experts, width, hidden), [Piece(f"{experts}.down_proj", down, 1, start, stop)]
    )
    shape = (moe.num_experts, 2 * inner)
    plan.add_columns(f"{layer}.gate_up_bias", f"{experts}.gate_up_proj_bias", shape, 2 * start, 2 * stop)
    plan.add_whole(f"{layer}.down_bias", f"{experts}.down_proj_bias", (moe.num_experts, hidden))


class OssMoe:
    """x += sum over the top k experts e of weight_e * mlp_e(norm(x)); the weights are a softmax over the chosen."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        self.norm = weights[f"{layer}.mlp_norm"]
        self.router = weights[f"{layer}.router"]
        self.router_bias = weights[f"{layer}.router_bias"]
        self.gate_up = weights[f"{layer}.gate_up"]
        self.gate_up_bias = weights[f"{layer}.gate_up_bias"]
        self.down = weights[f"{layer}.down"]
        # The sum over ranks must hold the bias once.
        self.down_bias = weights[f"{layer}.down_bias"] if tp.rank == 0 else None
        self.moe = config.moe
        self.eps = config.rms_norm_eps
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor) -> None:
        """x [T, H] in place."""
        normed = self.backend.rms_norm(x, self.norm, self.eps)
        logits = self.backend.linear(normed, self.router, self.router_bias)
        best, ids = logits.float().topk(self.moe.top_k, dim=-1)
        out = self.backend.biased_moe_mlp(
            normed,
            ids,
            best.softmax(dim=-1),
            self.gate_up,
            self.gate_up_bias,
            self.down,
            self.down_bias,
            self.moe.gate_slope,
            self.moe.limit,
        )
        x += self.tp.all_reduce(out)
