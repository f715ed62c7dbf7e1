"""Mixture of experts with one expert that sees every token (DeepSeek-MoE), as deepseek and qwen3_next have it."""

import torch
import torch.nn.functional as F

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.layers.moe import plan_moe
from models.layers.routing import route
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan


def plan_shared_moe(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """What `plan_moe` asks for, with the router in float32, its bias or table, and the shared expert."""
    moe, hidden, prefix = config.moe, config.hidden_size, f"model.layers.{layer}.mlp"
    plan_moe(plan, layer, config, sharding)
    plan.add_whole(f"{layer}.router", f"{prefix}.gate.weight", (moe.num_experts, hidden), torch.float32)
    if layer in moe.hash_layers:
        plan.add_whole(f"{layer}.table", f"{prefix}.gate.tid2eid", (config.vocab_size, moe.top_k), torch.int64)
    elif moe.has_correction:
        name = f"{prefix}.gate.e_score_correction_bias"
        plan.add_whole(f"{layer}.correction", name, (moe.num_experts,), torch.float32)
    inner = moe.shared_intermediate_size
    if not inner:
        return
    shared = f"{prefix}.{'shared_expert' if moe.has_shared_gate else 'shared_experts'}"
    parts = [(f"{shared}.{name}.weight", inner, *sharding.shared_expert) for name in ("gate_proj", "up_proj")]
    plan.add_rows(f"{layer}.shared_gate_up", parts, (hidden,))
    plan.add_columns(f"{layer}.shared_down", f"{shared}.down_proj.weight", (hidden, inner), *sharding.shared_expert)
    if moe.has_shared_gate:
        plan.add_whole(f"{layer}.shared_gate", f"{prefix}.shared_expert_gate.weight", (1, hidden))


class SharedMoe:
    """x += sum over chosen experts e of weight_e * mlp_e(norm(x)), + mlp_shared(norm(x))."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        self.moe = config.moe
        self.norm = weights[f"{layer}.mlp_norm"]
        self.router = weights[f"{layer}.router"]
        self.correction = weights.get(f"{layer}.correction")
        self.table = weights.get(f"{layer}.table")
        self.gate_up = weights[f"{layer}.gate_up"]
        self.down = weights[f"{layer}.down"]
        self.shared_gate_up = weights.get(f"{layer}.shared_gate_up")
        self.shared_down = weights.get(f"{layer}.shared_down")
        self.shared_gate = weights.get(f"{layer}.shared_gate")
        self.eps = config.rms_norm_eps
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor) -> None:
        """x [T, H] in place."""
        x += self.mix(self.backend.rms_norm(x, self.norm, self.eps))

    def mix(self, normed: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Output [T, H] for normalised tokens; a layer that looks experts up needs their ids int64 [T]."""
        backend, limit = self.backend, self.moe.limit
        fixed = None if self.table is None or token_ids is None else self.table[token_ids]
        ids, shares = route(F.linear(normed.float(), self.router), self.moe, self.correction, fixed)
        shares = shares.to(normed.dtype)
        if limit is None:
            out = backend.moe_mlp(normed, ids, shares, self.gate_up, self.down)
        else:
            out = backend.limited_moe_mlp(normed, ids, shares, self.gate_up, self.down, limit)
        if self.shared_gate_up is not None:
            out = out + self._shared(normed)
        return self.tp.all_reduce(out)

    def _shared(self, normed: torch.Tensor) -> torch.Tensor:
        backend = self.backend
        inner = backend.linear(normed, self.shared_gate_up)
        if self.moe.limit is not None:
            limit_gate_up(inner, self.moe.limit)
        out = backend.linear(backend.silu_and_mul(inner), self.shared_down)
        if self.shared_gate is not None:
            out *= F.linear(normed, self.shared_gate).sigmoid()
        return out


def limit_gate_up(gate_up: torch.Tensor, limit: float) -> None:
    """Bound gates [T, :I] above and the rest of gate_up [T, 2I] on both sides, in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate.clamp_(max=limit)
    up.clamp_(-limit, limit)
