"""Grouped-query attention over the paged pool, on this rank's heads."""

import torch

from kernels.interface import AttentionBatch, KernelBackend
from models.config import ModelConfig
from models.layer_types import LayerType
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan


def plan_attention(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """Fused q, k, v rows and the output projection's columns of this rank's heads, with norms and biases."""
    prefix, dim, heads = f"model.layers.{layer}", config.head_dim, sharding.heads
    q_range = (config.num_q_heads * dim, heads.q_start * dim, heads.q_end * dim)
    kv_range = (config.num_kv_heads * dim, heads.kv_start * dim, heads.kv_end * dim)
    ranges = {"q_proj": q_range, "k_proj": kv_range, "v_proj": kv_range}

    def parts(kind: str) -> list[tuple[str, int, int, int]]:
        return [(f"{prefix}.self_attn.{name}.{kind}", *extent) for name, extent in ranges.items()]

    plan.add_whole(
        f"{layer}.attn_norm", f"{prefix}.input_layernorm.weight", (config.hidden_size,), offset=config.norm_offset
    )
    plan.add_rows(f"{layer}.qkv", parts("weight"), (config.hidden_size,))
    if config.attention_bias:
        plan.add_rows(f"{layer}.qkv_bias", parts("bias"), ())
    output = f"{prefix}.self_attn.o_proj"
    plan.add_columns(f"{layer}.o", f"{output}.weight", (config.hidden_size, q_range[0]), *q_range[1:])
    if config.attention_out_bias:
        plan.add_whole(f"{layer}.o_bias", f"{output}.bias", (config.hidden_size,))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            plan.add_whole(f"{layer}.{name}", f"{prefix}.self_attn.{name}.weight", (dim,), offset=config.norm_offset)


class Attention:
    """x += attention(norm(x)), with the new keys and values stored in the pool.

    A layer with a weight `attn_post_norm` normalises what it adds; one with `sinks` has these logits in its softmax.
    """

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
        self.qkv_bias = weights.get(f"{layer}.qkv_bias")
        self.o = weights[f"{layer}.o"]
        # The sum over ranks must hold the bias once.
        self.o_bias = weights.get(f"{layer}.o_bias") if tp.rank == 0 else None
        self.q_norm = weights.get(f"{layer}.q_norm")
        self.k_norm = weights.get(f"{layer}.k_norm")
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        self.window = config.window if config.layer_type(layer) is LayerType.WINDOW else 0
        sinks = weights.get(f"{layer}.sinks")
        self.sinks = None if sinks is None else sinks.float()
        self.post_norm = weights.get(f"{layer}.attn_post_norm")
        self.num_q_heads = sharding.heads.num_q_heads
        self.cos_sin = cos_sin
        self.tp = tp
        self.backend = backend

    def forward(
        self, x: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, H] in place, and returned; kv_layer [num_pages, kv heads, 2, P, D].

        rows int64 [R]: only these outputs are wanted, and x of these rows, a copy, is returned: keys and values are
        stored for all tokens.
        """
        backend = self.backend
        qkv = backend.norm_linear(x, self.norm, self.eps, self.qkv, self.qkv_bias)
        q = backend.rope_and_store(
            qkv, self.cos_sin, kv_layer, batch, self.num_q_heads, self.q_norm, self.k_norm, self.eps
        )
        if rows is not None:
            x = x.index_select(0, rows)
            if not len(rows):
                return x
        out = backend.paged_attention(q, kv_layer, batch, self.scale, self.window, self.sinks).flatten(1)
        if rows is not None:
            out = out.index_select(0, rows)
        if self.tp.size == 1 and self.post_norm is None:
            backend.linear_residual(out, self.o, x, self.o_bias)
            return x
        added = self.tp.all_reduce(backend.linear(out, self.o, self.o_bias))
        x += added if self.post_norm is None else backend.rms_norm(added, self.post_norm, self.eps)
        return x
