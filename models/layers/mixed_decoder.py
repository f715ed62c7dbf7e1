"""A decoder whose layers mix tokens in ways of their own: embedding, layers, final norm and head."""

from typing import Protocol

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layers.attention import Attention
from models.layers.decoder import FeedForward
from models.layers.layer_views import LayerLeaves, LayerViews
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan


class Mixer(Protocol):
    """The first half of a layer."""

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> None:
        """Add to x [T, H] in place, and bring the layer's leaves to the end of the step's tokens."""


class AttentionMixer:
    """Grouped-query attention over the leaf `kv` of a group."""

    def __init__(self, attention: Attention, group: str) -> None:
        self._attention = attention
        self._group = group

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> None:
        """x [T, H] in place."""
        self._attention.forward(x, leaves["kv"], batch.attention[self._group])


def plan_ends(plan: WeightPlan, config: ModelConfig, sharding: Sharding) -> None:
    """Embedding, final norm and head. A tied head is a view of the embedding, which every rank has whole."""
    plan.add_whole("embedding", "model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    plan.add_whole("norm", "model.norm.weight", (config.hidden_size,), offset=config.norm_offset)
    if not config.tie_word_embeddings:
        plan.add_rows("head", [("lm_head.weight", config.vocab_size, *sharding.vocab)], (config.hidden_size,))


class MixedDecoder:
    """One rank's part of a decoder. Not thread-safe.

    `forward` brings every leaf that it is given to the end of the step's tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
        layers: list[tuple[Mixer, FeedForward]],
        table_bytes: int,
    ) -> None:
        """table_bytes: of the tables beside the weights."""
        self.config = config
        self.sharding = sharding
        self.tp = tp
        self.backend = backend
        self.layers = layers
        self.embedding = weights["embedding"]
        self.norm = weights["norm"]
        head = weights.get("head")
        self.head = self.embedding[slice(*sharding.vocab)] if head is None else head
        self.weight_bytes = sum(weight.nbytes for weight in weights.values()) + table_bytes
        self.views = LayerViews(config)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step; float32 logits [R, vocab] of the rows in `batch.logits_rows`, the same on every rank."""
        x = self.backend.embedding(batch.token_ids, self.embedding)
        for index, (leaves, (mixer, feed_forward)) in enumerate(
            zip(self.views.of(batch.leaves), self.layers, strict=True)
        ):
            mixer.forward(x, leaves, batch)
            if index == len(self.layers) - 1:
                # What follows the last layer's states is wanted for few tokens of a prompt, or for none.
                x = x.index_select(0, batch.logits_rows)
            if len(x):
                feed_forward.forward(x)
        return self.logits(x)

    def forget_pool(self) -> None:
        """Drop the views of the last pools, so that their memory can be given back."""
        self.views.forget()

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab] of stream rows [R, H]."""
        logits = self.backend.logits(rows, self.norm, self.config.rms_norm_eps, self.head)
        if self.tp.size > 1:
            logits = self.tp.all_gather_columns(logits, self.sharding.vocab_widths)
        return logits
