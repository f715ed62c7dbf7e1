"""Rows of a paged leaf [pages, rows of a page, ...]: where they are, reading and writing them.

A leaf with one row every r tokens has fewer rows a page; its page table is that of its group all the same.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch


@dataclass(frozen=True)
class Runs:
    """The sequences of a mixed step: those with one new token, batched, and the others one by one.

    singles: int64 [S] sequence numbers. single_tokens: int64 [S] their packed tokens.
    longer: (sequence number, packed tokens).
    """

    singles: torch.Tensor
    single_tokens: torch.Tensor
    longer: list[tuple[int, slice]]


def split_runs(batch: "AttentionBatch") -> Runs:
    """Look at the length of every run; waits for the device."""
    starts = batch.query_starts.tolist()
    spans = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    singles = [index for index, span in enumerate(spans) if span.stop - span.start == 1]
    longer = [(index, span) for index, span in enumerate(spans) if span.stop - span.start > 1]
    chosen = torch.tensor(singles, dtype=torch.int64, device=batch.positions.device)
    return Runs(chosen, batch.query_starts[chosen].long(), longer)


def store_rows(leaf: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, batch: "AttentionBatch") -> None:
    """leaf[row rows[t] of the sequence of token t] = values[t]; rows int64 [T], values [T, ...]."""
    pages, offsets = locate(rows, batch.page_table[batch.sequence_ids.long()], leaf.shape[1])
    leaf[pages, offsets] = values.to(leaf.dtype)


def locate(rows: torch.Tensor, page_table: torch.Tensor, rows_per_page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and offsets of rows [N] or [N, K], each row n looked up in page_table [N, max_pages]."""
    places = (rows // rows_per_page).view(rows.shape[0], -1)
    pages = page_table.long().gather(1, places).view(rows.shape)
    return pages, rows % rows_per_page


def gather_sequence(leaf: torch.Tensor, page_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of one sequence with page_table [max_pages] -> [length, ...]."""
    num_pages = -(-length // leaf.shape[1])
    return leaf[page_table[:num_pages].long()].flatten(0, 1)[:length]


def gather_batch(
    leaf: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of N sequences, page_table [N, max_pages] and lengths [N] -> [N, max_length, ...] and which are there
    (bool [N, max_length]). Rows that are not there are zero: what lies in their place may be no number."""
    num_pages = -(-max_length // leaf.shape[1])
    first_rows = torch.arange(num_pages, device=leaf.device) * leaf.shape[1]
    is_held = first_rows < lengths[:, None]
    pages = page_table[:, :num_pages].long().where(is_held, 0)
    rows = leaf[pages].flatten(1, 2)[:, :max_length]
    seen = torch.arange(max_length, device=leaf.device) < lengths[:, None]
    return rows.masked_fill(~seen.view(*seen.shape, *(1,) * (rows.dim() - 2)), 0), seen
