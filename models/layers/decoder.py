"""The decoder that the dense and mixture-of-experts families share: embedding, layers, final norm and head."""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from kernels.interface import KernelBackend, KernelShapes
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layer_types import LayerType
from models.layers.attention import Attention, plan_attention
from models.layers.ends import DecoderEnds, plan_ends
from models.layers.mlp import Mlp, plan_mlp
from models.layers.moe import Moe, plan_moe
from models.layers.rope import build_cos_sin
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan

# The state group that a layer's keys and values belong to, and the leaf in it.
GROUPS = {LayerType.FULL: "full", LayerType.WINDOW: "window"}
LEAF = "kv"
PlanLayer = Callable[[WeightPlan, int, ModelConfig, Sharding], None]


class FeedForward(Protocol):
    """The second half of a layer."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None: ...

    def forward(self, x: torch.Tensor) -> None:
        """Add to x [T, H] in place."""


def plan_decoder(
    config: ModelConfig,
    sharding: Sharding,
    dense: PlanLayer = plan_mlp,
    sparse: PlanLayer = plan_moe,
    mixer: PlanLayer = plan_attention,
) -> WeightPlan:
    """Every tensor of this rank.

    mixer: plans the first half of a layer; dense, sparse: the second, without and with experts.
    """
    plan = WeightPlan()
    plan_ends(plan, config, sharding)
    for layer in range(config.num_layers):
        mixer(plan, layer, config, sharding)
        (sparse if config.is_sparse(layer) else dense)(plan, layer, config, sharding)
    return plan


def kernel_shapes(config: ModelConfig, sharding: Sharding) -> KernelShapes:
    """What the layers of one rank will ask of the kernels."""
    start, end = sharding.mlp
    ends = (sharding.heads.num_q_heads * config.head_dim, end - start)  # inputs of the output and down projections
    hidden, is_alone = config.hidden_size, sharding.size == 1
    types = {config.layer_type(layer) for layer in range(config.num_layers)}
    has_kv_heads = bool(types & {LayerType.FULL, LayerType.WINDOW})
    return KernelShapes(
        linear_inputs=(hidden,) if is_alone else (hidden, *ends),
        residual_inputs=ends if is_alone else (),
        gate_up_inputs=(hidden,),
        logits_inputs=(hidden,),
        head_dims=(config.head_dim,) if has_kv_heads else (),
        heads_per_kv=sharding.heads.num_q_heads // sharding.heads.num_kv_heads,
    )


class DecoderModel(DecoderEnds):
    """One rank's part of a decoder, on the tensors that `plan_decoder` asked for.

    Not thread-safe. `forward` writes keys and values of the step's tokens into the pools that it is given. A family
    whose feed-forwards differ has its own `dense` or `sparse`.
    """

    dense: type[FeedForward] = Mlp
    sparse: type[FeedForward] = Moe

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
        tables = {LayerType.FULL: build_cos_sin(config.rope, max_positions, device)}
        tables[LayerType.WINDOW] = tables[LayerType.FULL]
        if config.window_rope is not None:
            tables[LayerType.WINDOW] = build_cos_sin(config.window_rope, max_positions, device)
        table_bytes = sum(table.nbytes for table in {id(table): table for table in tables.values()}.values())
        super().__init__(config, weights, sharding, tp, backend, table_bytes)
        # Rounded as a checkpoint's model rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype).item()
        self.layers: list[tuple[Attention, FeedForward]] = []
        for layer in range(config.num_layers):
            cos_sin = tables[config.layer_type(layer)]
            attention = Attention(weights, layer, config, sharding, tp, backend, cos_sin)
            feed_forward = (self.sparse if config.is_sparse(layer) else self.dense)(weights, layer, config, tp, backend)
            self.layers.append((attention, feed_forward))
        self.groups = [GROUPS[config.layer_type(layer)] for layer in range(config.num_layers)]
        self._leaf: weakref.ref[torch.Tensor] | None = None
        self._kv_layers: list[torch.Tensor] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step; float32 logits [R, vocab] of the rows in `batch.logits_rows`, the same on every rank."""
        x = self.backend.embedding(batch.token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        kv_layers = self._layer_views(batch.leaves)
        attention_batches = [batch.attention[group] for group in self.groups]
        for (attention, feed_forward), kv_layer, attention_batch in zip(
            self.layers[:-1], kv_layers[:-1], attention_batches[:-1], strict=True
        ):
            attention.forward(x, kv_layer, attention_batch)
            feed_forward.forward(x)
        # What follows the last layer's keys and values is wanted for few tokens of a prompt, or for none.
        rows = batch.logits_rows if len(batch.logits_rows) < len(x) else None
        attention, feed_forward = self.layers[-1]
        x = attention.forward(x, kv_layers[-1], attention_batches[-1], rows)
        if len(x):
            feed_forward.forward(x)
        return self.logits(x if rows is not None else x.index_select(0, batch.logits_rows))

    def forget_pool(self) -> None:
        """Drop the views of the last pool, so that its memory can be given back."""
        self._leaf, self._kv_layers = None, []

    def _layer_views(self, leaves: dict[str, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Per layer [num_pages, kv heads, 2, P, D], made once for pools that are made together."""
        first = leaves[self.groups[0]][LEAF]
        if self._leaf is None or self._leaf() is not first:
            by_group = {group: iter(leaves[group][LEAF].unbind(2)) for group in set(self.groups)}
            self._kv_layers = [next(by_group[group]) for group in self.groups]
            self._leaf = weakref.ref(first)
        return self._kv_layers
