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
    config: ModelConfig, sharding: Sharding, dense: PlanLayer = plan_mlp, sparse: PlanLayer = plan_moe
) -> WeightPlan:
    """Every tensor of this rank. A tied head is a view of the embedding, which every rank has whole.

    dense, sparse: plan the feed-forward of a layer without and with experts.
    """
    plan = WeightPlan()
    table = (config.vocab_size, config.hidden_size)
    plan.add_whole("embedding", "model.embed_tokens.weight", table)
    for layer in range(config.num_layers):
        plan_attention(plan, layer, config, sharding)
        is_sparse = config.moe is not None and config.moe.is_sparse(layer)
        (sparse if is_sparse else dense)(plan, layer, config, sharding)
    plan.add_whole("norm", "model.norm.weight", (config.hidden_size,), offset=config.norm_offset)
    if not config.tie_word_embeddings:
        plan.add_rows("head", [("lm_head.weight", config.vocab_size, *sharding.vocab)], (config.hidden_size,))
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


class DecoderModel:
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
        self.config = config
        self.sharding = sharding
        self.tp = tp
        self.backend = backend
        self.embedding = weights["embedding"]
        self.norm = weights["norm"]
        head = weights.get("head")
        self.head = self.embedding[slice(*sharding.vocab)] if head is None else head
        # Rounded as a checkpoint's model rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype).item()
        tables = {LayerType.FULL: build_cos_sin(config.rope, max_positions, device)}
        tables[LayerType.WINDOW] = tables[LayerType.FULL]
        if config.window_rope is not None:
            tables[LayerType.WINDOW] = build_cos_sin(config.window_rope, max_positions, device)
        self.layers: list[tuple[Attention, FeedForward]] = []
        for layer in range(config.num_layers):
            cos_sin = tables[config.layer_type(layer)]
            attention = Attention(weights, layer, config, sharding, tp, backend, cos_sin)
            is_sparse = config.moe is not None and config.moe.is_sparse(layer)
            feed_forward = (self.sparse if is_sparse else self.dense)(weights, layer, config, tp, backend)
            self.layers.append((attention, feed_forward))
        self.groups = [GROUPS[config.layer_type(layer)] for layer in range(config.num_layers)]
        table_bytes = sum(table.nbytes for table in {id(table): table for table in tables.values()}.values())
        self.weight_bytes = sum(weight.nbytes for weight in weights.values()) + table_bytes
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
        return self._logits(x if rows is not None else x.index_select(0, batch.logits_rows))

    def forget_pool(self) -> None:
        """Drop the views of the last pool, so that its memory can be given back."""
        self._leaf, self._kv_layers = None, []

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.backend.logits(rows, self.norm, self.config.rms_norm_eps, self.head)
        if self.tp.size > 1:
            logits = self.tp.all_gather_columns(logits, self.sharding.vocab_widths)
        return logits

    def _layer_views(self, leaves: dict[str, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Per layer [num_pages, kv heads, 2, P, D], made once for pools that are made together."""
        first = leaves[self.groups[0]][LEAF]
        if self._leaf is None or self._leaf() is not first:
            by_group = {group: iter(leaves[group][LEAF].unbind(2)) for group in set(self.groups)}
            self._kv_layers = [next(by_group[group]) for group in self.groups]
            self._leaf = weakref.ref(first)
        return self._kv_layers
