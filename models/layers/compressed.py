"""Attention of DeepSeek-V4 (section 2.3): a window of one vector a token, and compressed entries of older ones."""

from dataclasses import dataclass

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layer_types import LayerType
from models.layers.compressor import PAGED, Compressor, CompressorSpec, plan_compressor
from models.layers.layer_views import LayerLeaves
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.state_layout import split_range
from models.weight_plan import WeightPlan

WINDOW = "window"


@dataclass(frozen=True)
class GroupShard:
    """One rank's groups of the output projection [start, stop), and with them its query heads."""

    start: int
    stop: int
    heads_per_group: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def rows(self, per_head: int) -> tuple[int, int]:
        """Rows [start, stop) of a matrix with `per_head` rows a query head."""
        width = self.heads_per_group * per_head
        return self.start * width, self.stop * width


def shard_groups(config: ModelConfig, sharding: Sharding) -> GroupShard:
    """Whole groups by rank."""
    groups = config.compression.output_groups
    return GroupShard(*split_range(groups, sharding.size, sharding.rank), config.num_q_heads // groups)


def compressors(config: ModelConfig, layer: int) -> list[CompressorSpec]:
    """The layer's own, and its indexer's."""
    compression, kind, dim = config.compression, config.layer_type(layer), config.head_dim
    if kind is LayerType.HEAVILY_COMPRESSED:
        leaves = ("heavily_compressed", "heavy_partial", None)
        return [CompressorSpec(f"{layer}.compressor", dim, compression.heavy_ratio, False, *leaves)]
    if kind is not LayerType.COMPRESSED:
        return []
    ratio, index = compression.ratio, compression.index_head_dim
    return [
        CompressorSpec(f"{layer}.compressor", dim, ratio, True, "compressed", "overlap", "partial"),
        CompressorSpec(f"{layer}.indexer", index, ratio, True, "compressed_index", "index_overlap", "index_partial"),
    ]


def plan_compressed(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """Queries and output by rank in whole groups; all that becomes state, and the indexer, is whole on every rank.

    `a` stacks what reads the stream: the vector, what queries are projected from, and by compressor values and gates.
    """
    compression, shard, hidden, dim = (
        config.compression,
        shard_groups(config, sharding),
        config.hidden_size,
        config.head_dim,
    )
    prefix, rank = f"model.layers.{layer}.self_attn", config.compression.q_lora_rank
    stacked = [(f"{prefix}.kv_proj", dim), (f"{prefix}.q_a_proj", rank)]
    for spec, inner in zip(compressors(config, layer), ("compressor", "compressor.indexer"), strict=False):
        stacked += [(f"{prefix}.{inner}.{name}", spec.projected) for name in ("kv_proj", "gate_proj")]
        plan_compressor(plan, spec, f"{prefix}.{inner}")
    if config.layer_type(layer) is LayerType.COMPRESSED:
        indexer, heads = f"{prefix}.compressor.indexer", compression.index_heads
        stacked.append((f"{indexer}.scorer.weights_proj", heads))
        plan.add_whole(f"{layer}.index_q", f"{indexer}.q_b_proj.weight", (heads * compression.index_head_dim, rank))
    plan.add_whole(f"{layer}.attn_norm", f"model.layers.{layer}.input_layernorm.weight", (hidden,))
    plan.add_rows(f"{layer}.a", [(f"{name}.weight", rows, 0, rows) for name, rows in stacked], (hidden,))
    plan.add_whole(f"{layer}.q_a_norm", f"{prefix}.q_a_norm.weight", (rank,))
    plan.add_whole(f"{layer}.kv_norm", f"{prefix}.kv_norm.weight", (dim,))
    q_rows = (f"{prefix}.q_b_proj.weight", config.num_q_heads * dim, *shard.rows(dim))
    plan.add_rows(f"{layer}.q_b", [q_rows], (rank,))
    sinks = (f"{prefix}.sinks", config.num_q_heads, *shard.rows(1))
    plan.add_rows(f"{layer}.sinks", [sinks], (), torch.float32)
    inner, total = compression.output_rank, compression.output_groups * compression.output_rank
    extent = (shard.start * inner, shard.stop * inner)
    plan.add_rows(f"{layer}.o_a", [(f"{prefix}.o_a_proj.weight", total, *extent)], (shard.heads_per_group * dim,))
    plan.add_columns(f"{layer}.o", f"{prefix}.o_b_proj.weight", (hidden, total), *extent)


class CompressedAttention:
    """One layer of any of the three types; `forward` gives the output, not a residual."""

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
        """cos_sin: of this type of layer."""
        self.config = config
        self.compression = config.compression
        self.is_indexed = config.layer_type(layer) is LayerType.COMPRESSED
        self.groups = shard_groups(config, sharding).count
        self.eps = config.rms_norm_eps
        self.compressors = [
            Compressor(weights, spec, self.eps, cos_sin, backend) for spec in compressors(config, layer)
        ]
        self.norm = weights[f"{layer}.attn_norm"]
        self.a = weights[f"{layer}.a"]
        self.q_a_norm = weights[f"{layer}.q_a_norm"]
        self.q_b = weights[f"{layer}.q_b"]
        self.kv_norm = weights[f"{layer}.kv_norm"]
        self.index_q = weights.get(f"{layer}.index_q")
        self.sinks = weights[f"{layer}.sinks"]
        self.o_a = weights[f"{layer}.o_a"].unflatten(0, (self.groups, -1))  # [groups, rank, dims of a group's heads]
        self.o = weights[f"{layer}.o"]
        self.cos_sin = cos_sin
        self.tp = tp
        self.backend = backend
        self.widths = [config.head_dim, self.compression.q_lora_rank]
        self.widths += [self.compressors[0].spec.projected] * 2 if self.compressors else []
        self.widths += [self.compressors[1].spec.projected] * 2 if self.is_indexed else []

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> torch.Tensor:
        """x [T, H] before its norm -> output [T, H] of all ranks together."""
        backend, step, eps = self.backend, batch.attention[WINDOW], self.eps
        made = backend.norm_linear(x, self.norm, eps, self.a)
        kv, q_a, *rest = made.split([*self.widths, made.shape[1] - sum(self.widths)], dim=1)
        cos_sin = self.cos_sin[step.positions]
        row = backend.rotate_tail(backend.rms_norm(kv.contiguous(), self.kv_norm, eps)[:, None], cos_sin)[:, 0]
        backend.store_rows(leaves["kv"], step.positions, row, step)
        for index, compressor in enumerate(self.compressors):
            compressor.forward(rest[2 * index], rest[2 * index + 1], leaves, batch)
        q_a = backend.rms_norm(q_a.contiguous(), self.q_a_norm, eps)
        q = backend.linear(q_a, self.q_b).unflatten(1, (-1, self.config.head_dim))
        q = backend.rotate_tail(_unit(q, eps), cos_sin)
        out = self._attend(q, q_a, rest[-1], cos_sin, leaves, batch)
        out = backend.rotate_tail(out, cos_sin, inverse=True)
        grouped = torch.einsum("tgd,grd->tgr", out.flatten(1).unflatten(1, (self.groups, -1)), self.o_a)
        return self.tp.all_reduce(backend.linear(grouped.flatten(1), self.o))

    def _attend(
        self,
        q: torch.Tensor,
        q_a: torch.Tensor,
        weights: torch.Tensor,
        cos_sin: torch.Tensor,
        leaves: LayerLeaves,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """q [T, heads, D] over the window and, by type, all entries or the indexer's choice."""
        config, scale = self.config, self.config.head_dim**-0.5
        common = (q, leaves["kv"], batch.attention[WINDOW], config.window, self.sinks, scale)
        if not self.compressors:
            return self.backend.window_attention(*common)
        spec, paged, chosen = self.compressors[0].spec, batch.attention[PAGED], None
        if self.is_indexed:
            chosen = self._choose(q_a, weights, cos_sin, leaves, batch)
        return self.backend.window_attention(*common, leaves[spec.entries], paged, chosen, spec.ratio)

    def _choose(
        self,
        q_a: torch.Tensor,
        weights: torch.Tensor,
        cos_sin: torch.Tensor,
        leaves: LayerLeaves,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer: which entries each token looks at. weights [T, index heads]."""
        compression, backend = self.compression, self.backend
        q = backend.linear(q_a, self.index_q).unflatten(1, (-1, compression.index_head_dim))
        scaled = weights.float() * (compression.index_heads * compression.index_head_dim) ** -0.5
        keys, ratio = leaves[self.compressors[1].spec.entries], compression.ratio
        q = backend.rotate_tail(q, cos_sin)
        return backend.select_entries(q, scaled, keys, batch.attention[PAGED], ratio, compression.index_top_k)


def _unit(q: torch.Tensor, eps: float) -> torch.Tensor:
    """q [T, heads, D] with mean square 1 by head."""
    wide = q.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(q.dtype)
