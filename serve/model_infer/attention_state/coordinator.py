"""All state groups of a rank behind one face."""

from collections.abc import Mapping, Sequence

import torch

from models.state_layout import StateGroup, StateLayout
from serve.ipc.messages import JoinRow
from serve.model_infer.attention_state.base import AttentionState
from serve.model_infer.attention_state.checkpoint import CheckpointState
from serve.model_infer.errors import PlanError


class StateCoordinator:
    """Makes one manager a group and passes on what plans say of states. Checkpoint groups alone need to be told."""

    def __init__(self, layout: StateLayout, tp: int, rank: int, device: torch.device) -> None:
        self.layout = layout
        self.states = {group.name: _make(group, tp, rank, device) for group in layout.groups}
        self._checkpoints = {name: state for name, state in self.states.items() if isinstance(state, CheckpointState)}

    def allocate(self, num_pages: Mapping[str, int]) -> None:
        """Make all pools; num_pages by group."""
        for name, state in self.states.items():
            state.allocate(num_pages[name])

    def pools(self) -> dict[str, torch.Tensor]:
        """By group uint8 [num_pages, bytes of this rank's part of an object], for the staging engine."""
        return {name: state.pool for name, state in self.states.items()}

    def leaves(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views by group and leaf, for `ForwardBatch.leaves`."""
        return {name: state.leaves for name, state in self.states.items()}

    def begin(self, joins: Sequence[JoinRow]) -> None:
        """Working pages of new rows: restored where the plan says so, else cleared. Before the step's forward.

        Raises PlanError for cached tokens without their state, and for pages that do not exist.
        """
        for name, state in self._checkpoints.items():
            fresh, restored = [], []
            for join in joins:
                working, source = join.pages[name][0], join.restores.get(name)
                if source is None and join.num_cached:
                    raise PlanError(
                        f"row {join.row}: {join.num_cached} cached tokens without a state of group {name!r}"
                    )
                if source is None:
                    fresh.append(working)
                else:
                    restored.append((_existing(state, source), working))
            state.clear(fresh)
            state.restore(restored)

    def snapshot(self, copies: Sequence[tuple[str, int, int]]) -> None:
        """(group, working page, checkpoint page) each, after the step's forward. Raises PlanError."""
        by_group: dict[str, list[tuple[int, int]]] = {}
        for name, working, page in copies:
            if name not in self._checkpoints:
                raise PlanError(f"state group {name!r} has no checkpoints")
            by_group.setdefault(name, []).append((working, _existing(self._checkpoints[name], page)))
        for name, pairs in by_group.items():
            self._checkpoints[name].snapshot(pairs)


def _existing(state: AttentionState, page: int) -> int:
    if not 0 <= page < len(state.pool):
        raise PlanError(f"page {page} of group {state.group.name!r} is not in [0, {len(state.pool)})")
    return page


def _make(group: StateGroup, tp: int, rank: int, device: torch.device) -> AttentionState:
    return (AttentionState if group.is_paged_by_place else CheckpointState)(group, tp, rank, device)
