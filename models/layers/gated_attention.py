"""Grouped-query attention whose output is gated by the query projection (qwen3_next), over the paged pool."""

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layers.layer_views import LayerLeaves
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan

GROUP = "full"


def plan_gated_attention(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """q, k, v rows and the gate's of this rank's heads: in the checkpoint each head's query rows precede its gate's."""
    prefix, dim, heads, hidden = f"model.layers.{layer}.self_attn", config.head_dim, sharding.heads, config.hidden_size
    total = 2 * config.num_q_heads * dim
    firsts = [2 * head * dim for head in range(heads.q_start, heads.q_end)]
    queries = [(f"{prefix}.q_proj.weight", total, first, first + dim) for first in firsts]
    gates = [(f"{prefix}.q_proj.weight", total, first + dim, first + 2 * dim) for first in firsts]
    kv_range = (config.num_kv_heads * dim, heads.kv_start * dim, heads.kv_end * dim)
    keys_values = [(f"{prefix}.{name}.weight", *kv_range) for name in ("k_proj", "v_proj")]
    norm = f"model.layers.{layer}.input_layernorm.weight"
    plan.add_whole(f"{layer}.attn_norm", norm, (hidden,), offset=config.norm_offset)
    plan.add_rows(f"{layer}.qkv", queries + keys_values, (hidden,))
    plan.add_rows(f"{layer}.gate", gates, (hidden,))
    for name in ("q_norm", "k_norm"):
        plan.add_whole(f"{layer}.{name}", f"{prefix}.{name}.weight", (dim,), offset=config.norm_offset)
    shape = (hidden, config.num_q_heads * dim)
    plan.add_columns(f"{layer}.o", f"{prefix}.o_proj.weight", shape, heads.q_start * dim, heads.q_end * dim)


class GatedAttention:
    """x += out(attention(norm(x)) * sigmoid(gate(norm(x)))), with new keys and values stored in the leaf `kv`."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
        cos_sin: torch.Tensor,
    ) -> None:
        self.norm = weights[f"{layer}.attn_norm"]
        self.qkv = weights[f"{layer}.qkv"]
        self.gate = weights[f"{layer}.gate"]
        self.q_norm = weights[f"{layer}.q_norm"]
        self.k_norm = weights[f"{layer}.k_norm"]
        self.o = weights[f"{layer}.o"]
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.num_q_heads = sharding.heads.num_q_heads
        self.cos_sin = cos_sin
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> None:
        """x [T, H] in place."""
        backend, kv_layer, step = self.backend, leaves["kv"], batch.attention[GROUP]
        normed = backend.rms_norm(x, self.norm, self.eps)
        qkv, gate = backend.linear(normed, self.qkv), backend.linear(normed, self.gate)
        q = backend.rope_and_store(
            qkv, self.cos_sin, kv_layer, step, self.num_q_heads, self.q_norm, self.k_norm, self.eps
        )
        out = backend.paged_attention(q, kv_layer, step, self.scale).flatten(1)
        gated = (out.float() * gate.float().sigmoid()).to(out.dtype)
        if self.tp.size == 1:
            backend.linear_residual(gated, self.o, x)
        else:
            x += self.tp.all_reduce(backend.linear(gated, self.o))
