"""Mixture of SwiGLU experts with a softmax top-k router (qwen3_moe); every rank has a part of every expert."""

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import Piece, WeightPlan


def plan_moe(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """The router, and per expert the fused gate and up rows and the down columns of this rank."""
    moe, hidden = config.moe, config.hidden_size
    prefix = f"model.layers.{layer}"
    start, stop = sharding.expert
    width, inner = stop - start, moe.intermediate_size
    gate_up, down = [], []
    for expert in range(moe.num_experts):
        name = f"{prefix}.mlp.experts.{expert}"
        gate_up.append(Piece(f"{name}.gate_proj.weight", (inner, hidden), 0, start, stop, 0, expert))
        gate_up.append(Piece(f"{name}.up_proj.weight", (inner, hidden), 0, start, stop, width, expert))
        down.append(Piece(f"{name}.down_proj.weight", (hidden, inner), 1, start, stop, 0, expert))
    plan.add_whole(
        f"{layer}.mlp_norm", f"{prefix}.post_attention_layernorm.weight", (hidden,), offset=config.norm_offset
    )
    plan.add_whole(f"{layer}.router", f"{prefix}.mlp.gate.weight", (moe.num_experts, hidden))
    plan.add_experts(f"{layer}.gate_up", (moe.num_experts, 2 * width, hidden), gate_up)
    plan.add_experts(f"{layer}.down", (moe.num_experts, hidden, width), down)


class Moe:
    """x += sum over the top k experts e of weight_e * mlp_e(norm(x))."""

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
        self.gate_up = weights[f"{layer}.gate_up"]
        self.down = weights[f"{layer}.down"]
        self.eps = config.rms_norm_eps
        self.top_k = config.moe.top_k
        self.norm_topk_prob = config.moe.norm_topk_prob
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor) -> None:
        """x [T, H] in place."""
        normed = self.backend.rms_norm(x, self.norm, self.eps)
        ids, shares = self.route(normed)
        out = self.backend.moe_mlp(normed, ids, shares, self.gate_up, self.down)
        x += self.tp.all_reduce(out)

    def route(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids int64 [T, K] and their weights [T, K] in the model dtype; softmax in float32 over all experts."""
        logits = self.backend.linear(normed, self.router)
        shares, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return ids, shares.to(normed.dtype)
