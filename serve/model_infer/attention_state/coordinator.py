"""All state groups of a rank behind one face."""

from collections.abc import Mapping

import numpy as np
import torch

from models.state_layout import StateGroup, StateKind, StateLayout
from serve.model_infer.attention_state.base import AttentionState
from serve.model_infer.attention_state.full import FullAttentionState

# BOUNDED and TAIL managers enter here.
_MANAGERS: dict[StateKind, type[AttentionState]] = {StateKind.FULL: FullAttentionState}


class StateCoordinator:
    """Makes one manager a group and passes each step's events to all of them, in the layout's order."""

    def __init__(self, layout: StateLayout, num_kv_heads: int, device: torch.device) -> None:
        """num_kv_heads: those of this rank. Raises NotImplementedError for a kind without a manager."""
        self.layout = layout
        self.states = {group.name: _make(group, num_kv_heads, device) for group in layout.groups}

    def allocate(self, num_pages: Mapping[str, int]) -> None:
        """Make all pools; num_pages by group."""
        for name, state in self.states.items():
            state.allocate(num_pages[name])

    def pools(self) -> dict[str, torch.Tensor]:
        """Pools by group, for `ForwardBatch.kv_pools`."""
        return {name: state.pool for name, state in self.states.items()}

    def padded_pools(self) -> dict[str, torch.Tensor]:
        """The same pools, each with a spare page behind its last one."""
        return {name: state.padded_pool for name, state in self.states.items()}

    def advance(self, rows: np.ndarray, context_lens: np.ndarray) -> None:
        """A forward has moved rows int64 [B] to context_lens [B] tokens."""
        for state in self.states.values():
            state.advance(rows, context_lens)


def _make(group: StateGroup, num_kv_heads: int, device: torch.device) -> AttentionState:
    manager = _MANAGERS.get(group.kind)
    if manager is None:
        raise NotImplementedError(f"state group {group.name!r}: no manager for states of kind {group.kind.value}")
    return manager(group, num_kv_heads, device)
