"""Gated delta net (Yang et al. 2024) of qwen3_next and qwen3_5: linear attention with a state of fixed size."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layers.layer_views import LayerLeaves
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.state_layout import split_range
from models.weight_plan import WeightPlan

GROUP = "recurrent"


@dataclass(frozen=True)
class DeltaHeads:
    """One rank's key heads [start, stop) with the value heads that use them, and their parts of the projection."""

    start: int
    stop: int
    per_key_head: dict[str, int]  # rows of one key head's part of each segment

    @property
    def widths(self) -> dict[str, int]:
        """Rows of this rank."""
        return {name: (self.stop - self.start) * rows for name, rows in self.per_key_head.items()}


def delta_heads(config: ModelConfig, sharding: Sharding) -> DeltaHeads:
    """Whole key heads by rank."""
    linear = config.linear_attention
    group = linear.num_v_heads // linear.num_k_heads
    key, value = linear.k_head_dim, group * linear.v_head_dim
    rows = {"q": key, "k": key, "v": value, "z": value, "b": group, "a": group}
    return DeltaHeads(*split_range(linear.num_k_heads, sharding.size, sharding.rank), rows)


Rows = list[tuple[str, int, int, int]]  # of a fused matrix: (tensor, its rows, start, stop)


def rows_by_head(prefix: str, heads: DeltaHeads, num_k_heads: int) -> Rows:
    """Rows of q, k, v, z, b, a in order, out of matrices of [q | k | v | z] and [b | a] by key head."""
    rows: Rows = []
    for names, tensor in ((("q", "k", "v", "z"), "in_proj_qkvz"), (("b", "a"), "in_proj_ba")):
        height = sum(heads.per_key_head[name] for name in names)
        offset = 0
        for name in names:
            width = heads.per_key_head[name]
            for head in range(heads.start, heads.stop):
                first = head * height + offset
                rows.append((f"{prefix}.{tensor}.weight", num_k_heads * height, first, first + width))
            offset += width
    return rows


def rows_by_segment(prefix: str, heads: DeltaHeads, num_k_heads: int) -> Rows:
    """The same out of a matrix of [q | k | v] and one for each of the others."""
    rows = _segments(f"{prefix}.in_proj_qkv.weight", ("q", "k", "v"), heads, num_k_heads)
    for name in ("z", "b", "a"):
        rows += _segments(f"{prefix}.in_proj_{name}.weight", (name,), heads, num_k_heads)
    return rows


def _segments(tensor: str, names: tuple[str, ...], heads: DeltaHeads, num_k_heads: int) -> Rows:
    """This rank's part of each of the segments that `tensor` stacks: a contiguous part of the whole would be wrong."""
    total = sum(num_k_heads * heads.per_key_head[name] for name in names)
    rows: Rows = []
    first = 0
    for name in names:
        width = heads.per_key_head[name]
        rows.append((tensor, total, first + heads.start * width, first + heads.stop * width))
        first += num_k_heads * width
    return rows


def plan_delta_net(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """Fused projections, convolution and output of this rank's key heads."""
    linear, heads, hidden = config.linear_attention, delta_heads(config, sharding), config.hidden_size
    prefix, num_k_heads = f"model.layers.{layer}.linear_attn", linear.num_k_heads
    rows = (rows_by_head if linear.is_by_head else rows_by_segment)(prefix, heads, num_k_heads)
    norm = f"model.layers.{layer}.input_layernorm.weight"
    plan.add_whole(f"{layer}.attn_norm", norm, (hidden,), offset=config.norm_offset)
    plan.add_rows(f"{layer}.in", rows, (hidden,))
    convolution = _segments(f"{prefix}.conv1d.weight", ("q", "k", "v"), heads, num_k_heads)
    plan.add_rows(f"{layer}.conv", convolution, (1, linear.conv_kernel))
    for key, name in (("log_a", "A_log"), ("dt_bias", "dt_bias")):
        plan.add_rows(f"{layer}.{key}", _segments(f"{prefix}.{name}", ("a",), heads, num_k_heads), (), torch.float32)
    plan.add_whole(f"{layer}.gated_norm", f"{prefix}.norm.weight", (linear.v_head_dim,))
    width = heads.per_key_head["v"]
    shape = (hidden, num_k_heads * width)
    plan.add_columns(f"{layer}.o", f"{prefix}.out_proj.weight", shape, heads.start * width, heads.stop * width)


class DeltaNet:
    """x += out(gated_norm(delta_rule(conv(q, k, v)), z)) of norm(x).

    Leaves: `conv_q`, `conv_k`, `conv_v` and `recurrent`, by key head, of the group of checkpoints.
    """

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        self.linear = config.linear_attention
        self.widths = list(delta_heads(config, sharding).widths.values())
        self.norm = weights[f"{layer}.attn_norm"]
        self.project = weights[f"{layer}.in"]
        self.conv = weights[f"{layer}.conv"][:, 0]
        self.decay = weights[f"{layer}.log_a"].exp()
        self.dt_bias = weights[f"{layer}.dt_bias"]
        self.gated_norm = weights[f"{layer}.gated_norm"]
        self.o = weights[f"{layer}.o"]
        self.eps = config.rms_norm_eps
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> None:
        """x [T, H] in place."""
        backend, linear = self.backend, self.linear
        step, pages = batch.attention[GROUP], batch.state_pages[GROUP]
        projected = backend.norm_linear(x, self.norm, self.eps, self.project)
        parts = projected.split([sum(self.widths[:3]), *self.widths[3:]], dim=1)
        qkv, z, b, a = parts
        states = (leaves["conv_q"], leaves["conv_k"], leaves["conv_v"])
        q, k, v = backend.causal_conv(qkv, self.conv, states, pages, step).split(self.widths[:3], dim=1)
        log_decay = -self.decay * F.softplus(a.float() + self.dt_bias)
        out = backend.gated_delta_rule(
            q.unflatten(1, (-1, linear.k_head_dim)),
            k.unflatten(1, (-1, linear.k_head_dim)),
            v.unflatten(1, (-1, linear.v_head_dim)),
            log_decay,
            b.float().sigmoid(),
            leaves["recurrent"],
            pages,
            step,
        )
        normed = backend.rms_norm(out, self.gated_norm, self.eps).flatten(1)
        gated = (normed.float() * F.silu(z.float())).to(normed.dtype)
        if self.tp.size == 1:
            backend.linear_residual(gated, self.o, x)
        else:
            x += self.tp.all_reduce(backend.linear(gated, self.o))
