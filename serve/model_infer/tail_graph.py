"""The step behind a cached prefix as one graph: a prompt whose last tokens alone have to be computed.

Launching such a step's kernels one by one takes longer than the kernels do.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from kernels.interface import AttentionBatch
from models.forward import ForwardBatch
from serve.model_infer.decode_buffers import GroupPool

# What a hit leaves of a prompt is at most a page of the usual size.
TAIL_TOKENS = 64


class _Model(Protocol):
    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


class _Replay(Protocol):
    def replay(self) -> None: ...


class TailBuffers:
    """The fixed tensors that the captured step reads: one sequence, and behind it padding as a second sequence.

    The padding's keys and values go to the spare page of each group.
    """

    def __init__(self, groups: Mapping[str, GroupPool], device: torch.device) -> None:
        self._groups = dict(groups)
        self._token_ids = torch.zeros(TAIL_TOKENS, dtype=torch.int64, device=device)
        self._counting = torch.arange(TAIL_TOKENS, dtype=torch.int64, device=device)
        self._positions = self._counting.clone()
        self._sequence_ids = torch.ones(TAIL_TOKENS, dtype=torch.int32, device=device)
        self._query_starts = torch.tensor([0, 0, TAIL_TOKENS], dtype=torch.int32, device=device)
        self._context_lens = torch.full((2,), TAIL_TOKENS, dtype=torch.int32, device=device)
        self._logits_rows = torch.zeros(1, dtype=torch.int64, device=device)
        self._tables = {
            name: torch.full((2, group.max_pages), group.spare_page, dtype=torch.int32, device=device)
            for name, group in self._groups.items()
        }

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether a batch of one sequence is short enough, and its page tables not wider than these."""
        widths = [(batch.attention[name].page_table.shape[1], table.shape[1]) for name, table in self._tables.items()]
        return len(batch.token_ids) <= TAIL_TOKENS and all(width <= most for width, most in widths)

    def fill(self, batch: ForwardBatch) -> None:
        """Take over a batch of one sequence whose last token's logits are wanted."""
        count = len(batch.token_ids)
        attention = next(iter(batch.attention.values()))
        self._token_ids[:count].copy_(batch.token_ids)
        self._token_ids[count:] = 0
        self._positions[:count].copy_(attention.positions)
        self._positions[count:].copy_(self._counting[: TAIL_TOKENS - count])
        self._sequence_ids[:count] = 0
        self._sequence_ids[count:] = 1
        self._query_starts[1] = count
        self._context_lens[:1].copy_(attention.context_lens)
        self._context_lens[1] = max(TAIL_TOKENS - count, 1)
        self._logits_rows[0] = count - 1
        for name, table in self._tables.items():
            page_table = batch.attention[name].page_table
            table[:1, : page_table.shape[1]].copy_(page_table)

    def clear(self) -> None:
        """Make all tokens padding: the first sequence, too, then lies in the spare pages."""
        for name, table in self._tables.items():
            table[0] = self._groups[name].spare_page
        self._context_lens.fill_(TAIL_TOKENS)
        self._query_starts[1] = TAIL_TOKENS
        self._sequence_ids.fill_(0)
        self._positions.copy_(self._counting)

    def batch(self) -> ForwardBatch:
        """What the captured step reads."""
        attention = {
            name: AttentionBatch(
                query_starts=self._query_starts,
                context_lens=self._context_lens,
                page_table=self._tables[name],
                positions=self._positions,
                sequence_ids=self._sequence_ids,
                max_query_len=TAIL_TOKENS,
                max_context_len=group.max_pages * group.page_tokens,
                page_size=group.page_tokens,
            )
            for name, group in self._groups.items()
        }
        leaves = {name: group.leaves for name, group in self._groups.items()}
        return ForwardBatch(self._token_ids, attention, leaves, self._logits_rows)


class TailGraph:
    """Runs steps of one sequence of at most `TAIL_TOKENS` new tokens by replay. In inference mode, on one thread."""

    def __init__(
        self,
        model: _Model,
        groups: Mapping[str, GroupPool],
        vocab_size: int,
        device: torch.device,
        capture: Callable[[Callable[[], None]], _Replay],
    ) -> None:
        """groups: all with page tables. capture: as for `DecodeGraphs`."""
        self._model = model
        self._capture = capture
        self._buffers = TailBuffers(groups, device)
        self._logits = torch.empty(1, vocab_size, dtype=torch.float32, device=device)
        self._replay: _Replay | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture with padding only; without this the first step does it."""
        self._buffers.clear()
        self._captured()

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits [1, vocab] of the last token of a batch of one sequence, valid until the next call; None where the
        batch does not fit."""
        if not self._buffers.fits(batch):
            return None
        self._buffers.fill(batch)
        self._captured().replay()
        return self._logits

    def _captured(self) -> _Replay:
        if self._replay is None:
            batch = self._buffers.batch()

            def run() -> None:
                self._logits.copy_(self._model.forward(batch))

            self._replay = self._capture(run)
        return self._replay
