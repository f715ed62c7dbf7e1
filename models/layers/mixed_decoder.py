"""A decoder whose layers mix tokens in ways of their own: embedding, layers, final norm and head."""

from typing import Protocol

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layers.attention import Attention
from models.layers.decoder import FeedForward
from models.layers.ends import DecoderEnds
from models.layers.layer_views import LayerLeaves, LayerViews
from models.layers.mlp import Mlp
from models.layers.rope import build_cos_sin
from models.layers.shared_moe import SharedMoe
from models.parallel import TensorParallel
from models.sharding import Sharding


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


class MixedDecoder(DecoderEnds):
    """One rank's part of a decoder. Not thread-safe.

    `forward` brings every leaf that it is given to the end of the step's tokens. A family makes the first halves of its
    layers, and names the classes of the second ones where they are others.
    """

    dense: type[FeedForward] = Mlp
    sparse: type[FeedForward] = SharedMoe

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
        cos_sin = build_cos_sin(config.rope, max_positions, device)
        super().__init__(config, weights, sharding, tp, backend, cos_sin.nbytes)
        self.layers: list[tuple[Mixer, FeedForward]] = []
        for layer in range(config.num_layers):
            feed_forward = (self.sparse if config.is_sparse(layer) else self.dense)(weights, layer, config, tp, backend)
            self.layers.append((self.make_mixer(weights, layer, cos_sin), feed_forward))
        self.views = LayerViews(config)

    def make_mixer(self, weights: dict[str, torch.Tensor], layer: int, cos_sin: torch.Tensor) -> Mixer:
        """The first half of a layer; cos_sin as `build_cos_sin` gives it."""
        raise NotImplementedError

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
