"""States that grow by token: the keys and values of full attention."""

import numpy as np
import torch

from kernels.cpu.memory import empty_huge
from models.state_layout import ShardKind, StateGroup
from serve.model_infer.attention_state.base import TORCH_DTYPES, AttentionState


class FullAttentionState(AttentionState):
    """K and V of all layers of a group, [num_pages, kv_heads of this rank, layers, 2, page_tokens, head_dim].

    A boundary needs no copy: the complete pages below it are the state, and nothing is kept beside them. Behind the
    pool's last page lies a spare one that no plan names: padding of captured decode steps writes there.
    """

    def __init__(self, group: StateGroup, num_kv_heads: int, device: torch.device) -> None:
        super().__init__(group, num_kv_heads, device)
        if len(group.leaves) != 1 or group.leaves[0].shard is not ShardKind.HEAD or len(group.leaves[0].shape) != 2:
            raise NotImplementedError(f"state group {group.name!r}: only one leaf of (2, head_dim) by kv head")
        leaf = group.leaves[0]
        self._dtype = TORCH_DTYPES[leaf.dtype]
        self._page_shape = (num_kv_heads, len(leaf.layers), leaf.shape[0], group.page_tokens, leaf.shape[1])
        self._padded_pool: torch.Tensor | None = None
        self._pool: torch.Tensor | None = None

    @property
    def bytes_per_page(self) -> int:
        leaf = self.group.leaves[0]
        return leaf.bytes_per_row * len(leaf.layers) * self.num_kv_heads * self.group.page_tokens

    def allocate(self, num_pages: int) -> None:
        shape = (num_pages + 1, *self._page_shape)
        if self.device.type == "cpu":
            # Fresh memory: in some used before, a stale NaN would reach a result as 0 * NaN.
            self._padded_pool = empty_huge(shape, self._dtype)
        else:
            self._padded_pool = torch.zeros(shape, dtype=self._dtype, device=self.device)
        self._pool = self._padded_pool[:num_pages]

    @property
    def pool(self) -> torch.Tensor:
        if self._pool is None:
            raise RuntimeError(f"state group {self.group.name!r} has no pool yet")
        return self._pool

    @property
    def padded_pool(self) -> torch.Tensor:
        if self._padded_pool is None:
            raise RuntimeError(f"state group {self.group.name!r} has no pool yet")
        return self._padded_pool

    def advance(self, rows: np.ndarray, context_lens: np.ndarray) -> None:
        """Nothing is kept beside the pages."""

    def snapshot(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """The pages below the boundary are the snapshot."""

    def restore(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """The pages below the boundary are the state."""
