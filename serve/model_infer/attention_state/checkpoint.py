"""States of fixed size that every step overwrites, and their checkpoints: recurrent, convolution and tail states."""

from collections.abc import Sequence

import torch

from serve.model_infer.attention_state.base import AttentionState


class CheckpointState(AttentionState):
    """A page is a whole state. A running row has a working page; a checkpoint page is written once, by `snapshot`.

    All methods launch their copies on the current stream and return: a snapshot taken after a forward holds what that
    forward left, and a state restored before it is what that forward reads.
    """

    def clear(self, pages: Sequence[int]) -> None:
        """Working `pages` become the state of a sequence without tokens."""
        targets = [self.pool[page] for page in pages]
        targets += [scratch[page] for scratch in self._scratch() for page in pages]
        if targets:
            torch._foreach_zero_(targets)

    def restore(self, copies: Sequence[tuple[int, int]]) -> None:
        """(checkpoint page, working page) each: the working page becomes what the checkpoint is."""
        self._copy(copies)
        stale = [scratch[working] for scratch in self._scratch() for _, working in copies]
        if stale:
            torch._foreach_zero_(stale)

    def snapshot(self, copies: Sequence[tuple[int, int]]) -> None:
        """(working page, checkpoint page) each, of rows that stand on a page boundary."""
        self._copy(copies)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            torch._foreach_copy_([self.pool[to] for _, to in copies], [self.pool[source] for source, _ in copies])

    def _scratch(self) -> list[torch.Tensor]:
        return [self.leaves[leaf.name] for leaf in self.group.scratch_leaves]
