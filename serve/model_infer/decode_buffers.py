"""The fixed tensors that a captured decode step reads, and how a step's rows get into them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch
from models.forward import ForwardBatch


@dataclass(frozen=True)
class GroupPool:
    """One state group. leaves: with the spare page, which is their last; max_pages: columns of a page table, 0 in a
    group of checkpoints."""

    leaves: dict[str, torch.Tensor]
    page_tokens: int
    max_pages: int

    @property
    def spare_page(self) -> int:
        return len(next(iter(self.leaves.values()))) - 1


class DecodeBuffers:
    """Inputs of up to `max_rows` sequences of one new token each.

    Rows that no sequence fills are padding: a context of one token in the spare page of each group. They may run
    through the model at any time, so a row becomes padding again before its sequence can lose its pages to another.
    """

    def __init__(self, groups: Mapping[str, GroupPool], max_rows: int, device: torch.device) -> None:
        self._groups = dict(groups)
        self._max_context_len = min(group.max_pages * group.page_tokens for group in groups.values() if group.max_pages)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._context_lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._counting_long = self._counting.to(torch.int64)
        self._tables = {
            name: torch.full((max_rows, group.max_pages), group.spare_page, dtype=torch.int32, device=device)
            for name, group in self._groups.items()
        }
        self._state_pages = {
            name: torch.full((max_rows,), group.spare_page, dtype=torch.int64, device=device)
            for name, group in self._groups.items()
            if not group.max_pages
        }
        self._num_filled = 0
        self._copied: dict[str, torch.Tensor] = {}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the page tables of the batch are not wider than these (tables can grow)."""
        return all(batch.attention[name].page_table.shape[1] <= table.shape[1] for name, table in self._tables.items())

    def fill(self, batch: ForwardBatch) -> None:
        """Take over a batch of one new token a sequence; the rows behind it become padding."""
        count = len(batch.token_ids)
        self._pad(count)
        # Every group of a step has the same sequences and lengths.
        attention = next(iter(batch.attention.values()))
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(attention.positions)
        self._context_lens[:count].copy_(attention.context_lens)
        for name, table in self._tables.items():
            page_table = batch.attention[name].page_table
            if self._copied.get(name) is not page_table:  # the batch passes on the same tensor until pages change
                table[:count, : page_table.shape[1]].copy_(page_table)
                self._copied[name] = page_table
        for name, pages in self._state_pages.items():
            pages[:count].copy_(batch.state_pages[name])
        self._num_filled = count

    def clear(self) -> None:
        """Make all rows padding."""
        self._pad(0)
        self._copied.clear()

    def batch(self, num_rows: int) -> ForwardBatch:
        """The first `num_rows` rows as views: what a captured step reads."""
        attention = {
            name: AttentionBatch(
                query_starts=self._counting[: num_rows + 1],
                context_lens=self._context_lens[:num_rows],
                page_table=self._tables[name][:num_rows],
                positions=self._positions[:num_rows],
                sequence_ids=self._counting[:num_rows],
                max_query_len=1,
                max_context_len=self._max_context_len,
                page_size=group.page_tokens,
            )
            for name, group in self._groups.items()
        }
        leaves = {name: group.leaves for name, group in self._groups.items()}
        state_pages = {name: pages[:num_rows] for name, pages in self._state_pages.items()}
        return ForwardBatch(self._token_ids[:num_rows], attention, leaves, self._counting_long[:num_rows], state_pages)

    def _pad(self, first: int) -> None:
        """Rows [first, filled) become padding."""
        if first >= self._num_filled:
            return
        rows = slice(first, self._num_filled)
        self._token_ids[rows] = 0
        self._positions[rows] = 0
        self._context_lens[rows] = 1
        for name, table in self._tables.items():
            table[rows, :1] = self._groups[name].spare_page
        for name, pages in self._state_pages.items():
            pages[rows] = self._groups[name].spare_page
        self._num_filled = first
