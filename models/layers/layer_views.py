"""The leaves of a step's pools, layer by layer."""

import weakref

import torch

from models.config import ModelConfig
from models.state_layout import ShardKind, derive_layout, page_multiple

LayerLeaves = dict[str, torch.Tensor]


class LayerViews:
    """Views of one layer each, made once a pool and without keeping it alive on its own account after `forget`."""

    def __init__(self, config: ModelConfig) -> None:
        layout = derive_layout(config, page_multiple(config), "float32")
        self._num_layers = config.num_layers
        self._leaves = [(group.name, leaf) for group in layout.groups for leaf in group.leaves]
        self._source: weakref.ref[torch.Tensor] | None = None
        self._views: list[LayerLeaves] = []

    def of(self, leaves: dict[str, dict[str, torch.Tensor]]) -> list[LayerLeaves]:
        """By layer and leaf [pages, heads, ...], without the dimension of heads where the leaf is replicated."""
        group, leaf = self._leaves[0]
        source = leaves[group][leaf.name]
        if self._source is None or self._source() is not source:
            self._views = self._make(leaves)
            self._source = weakref.ref(source)
        return self._views

    def forget(self) -> None:
        """Drop the views, so that the pool's memory can be given back."""
        self._source, self._views = None, []

    def _make(self, leaves: dict[str, dict[str, torch.Tensor]]) -> list[LayerLeaves]:
        views: list[LayerLeaves] = [{} for _ in range(self._num_layers)]
        for group, leaf in self._leaves:
            whole = leaves[group][leaf.name]
            for index, layer in enumerate(leaf.layers):
                view = whole[:, :, index]
                views[layer][leaf.name] = view[:, 0] if leaf.shard is ShardKind.REPLICATED else view
        return views
