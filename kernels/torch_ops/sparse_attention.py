"""Attention to a window and to chosen compressed entries, and the indexer that chooses them (DeepSeek-V4, section 2.3).

Every query gathers its own rows, so that prompts and decoding are one path; queries go in blocks that bound the memory.
"""

from typing import TYPE_CHECKING

import torch

from kernels.torch_ops.paging import gather_batch, locate

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch

_BLOCK = 64


def select_entries(
    q: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, batch: "AttentionBatch", ratio: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.state_ops.StateOps.select_entries`."""
    max_entries = batch.max_context_len // ratio
    lengths = (batch.positions + 1) // ratio
    parts = []
    for start in range(0, q.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        tables = batch.page_table[batch.sequence_ids[block].long()]
        rows, seen = gather_batch(keys, tables, lengths[block], max_entries)  # [t, E, D]
        if max_entries <= count:
            parts.append((torch.arange(max_entries, device=q.device).expand(rows.shape[0], -1), seen))
            continue
        scores = torch.einsum("thd,ted->the", q[block].float(), rows.float()).relu_()
        scores = torch.einsum("the,th->te", scores, head_weights[block].float())
        order = scores.masked_fill(~seen, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :count]
        parts.append((order, order < lengths[block, None]))
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([valid for _, valid in parts])


def window_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    batch: "AttentionBatch",
    window_tokens: int,
    sinks: torch.Tensor,
    scale: float,
    entries: torch.Tensor | None,
    entry_batch: "AttentionBatch | None",
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
    ratio: int,
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.window_attention`."""
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        positions, sequences = batch.positions[block], batch.sequence_ids[block].long()
        tables = batch.page_table[sequences]
        rows, seen = _window_rows(window, tables, positions, min(window_tokens, batch.max_context_len))
        if entries is not None and entry_batch is not None:
            entry_tables = entry_batch.page_table[sequences]
            if chosen is None:
                lengths = (positions + 1) // ratio
                more, more_seen = gather_batch(entries, entry_tables, lengths, batch.max_context_len // ratio)
            else:
                more, more_seen = _chosen_rows(entries, entry_tables, chosen[0][block], chosen[1][block])
            rows, seen = torch.cat((rows, more), dim=1), torch.cat((seen, more_seen), dim=1)
        out[block] = _attend(q[block], rows, seen, sinks, scale).to(q.dtype)
    return out


def _window_rows(
    window: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `count` rows up to each position -> [t, count, D], and which exist (bool [t, count])."""
    rows = positions[:, None] - torch.arange(count - 1, -1, -1, device=positions.device)
    seen = rows >= 0
    pages, offsets = locate(rows.clamp_min(0), tables, window.shape[1])
    return window[pages, offsets], seen


def _chosen_rows(
    entries: torch.Tensor, tables: torch.Tensor, chosen: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries by number, chosen int64 [t, K] -> [t, K, D]; those not valid are zero."""
    pages, offsets = locate(chosen.where(valid, 0), tables, entries.shape[1])
    rows = entries[pages.where(valid, 0), offsets.where(valid, 0)]
    return rows.masked_fill(~valid[..., None], 0), valid


def _attend(q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """q [t, H, D] over rows [t, S, D], which are keys and values at once; one more logit a head takes a share of the
    softmax and adds nothing. -> float32 [t, H, D]."""
    wide = rows.float()
    scores = torch.einsum("thd,tsd->ths", q.float(), wide) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    sink = sinks.float()[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("ths,tsd->thd", weights, wide)
