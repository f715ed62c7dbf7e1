"""Multi-head latent attention (DeepSeek-V2, section 2.1) over paged latents."""

from typing import TYPE_CHECKING

import torch

from kernels.torch_ops.paging import gather_batch, gather_sequence, split_runs

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch


def latent_attention(
    q: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, batch: "AttentionBatch", scale: float
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.latent_attention`."""
    if batch.max_query_len == 1:
        return _absorbed(q, latent, kv_b, batch.page_table, batch.context_lens, batch.max_context_len, scale)
    value_dim = kv_b.shape[1] - (q.shape[2] - _rotary_dim(latent, kv_b))
    out = q.new_empty(*q.shape[:2], value_dim)
    runs = split_runs(batch)
    if len(runs.singles):
        tables, lengths = batch.page_table[runs.singles], batch.context_lens[runs.singles]
        one = _absorbed(q[runs.single_tokens], latent, kv_b, tables, lengths, batch.max_context_len, scale)
        out[runs.single_tokens] = one
    for index, tokens in runs.longer:
        length = int(batch.context_lens[index])
        rows = gather_sequence(latent, batch.page_table[index], length)
        out[tokens] = _expanded(q[tokens], rows, kv_b, batch.positions[tokens], scale)
    return out


def _rotary_dim(latent: torch.Tensor, kv_b: torch.Tensor) -> int:
    return latent.shape[-1] - kv_b.shape[2]


def _absorbed(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    scale: float,
) -> torch.Tensor:
    """One query a sequence, q [B, H, N + R]: keys and values stay latent, the projections go to query and output."""
    nope = q.shape[2] - _rotary_dim(latent, kv_b)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = torch.einsum("bhn,hnc->bhc", q[..., :nope].to(wide), kv_b[:, :nope].to(wide))
    rows, seen = gather_batch(latent, page_table, lengths, max_length)  # [B, S, C + R]
    rows = rows.to(wide)
    scores = torch.einsum("bhc,bsc->bhs", torch.cat((queries, q[..., nope:].to(wide)), dim=-1), rows) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
    mixed = torch.einsum("bhs,bsc->bhc", weights, rows[..., : kv_b.shape[2]])
    return torch.einsum("bhc,hvc->bhv", mixed, kv_b[:, nope:].to(wide)).to(q.dtype)


def _expanded(
    q: torch.Tensor, rows: torch.Tensor, kv_b: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Many queries of one sequence, q [t, H, N + R] at `positions` over latent rows [S, C + R]: keys and values of
    every head are made first, which costs less than wide scores once there are many queries."""
    rank, nope = kv_b.shape[2], q.shape[2] - (rows.shape[1] - kv_b.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = rows.to(wide)
    keys_values = torch.einsum("sc,hdc->hsd", rows[:, :rank], kv_b.to(wide))  # [H, S, N + V]
    q = q.to(wide).transpose(0, 1)  # [H, t, N + R]
    scores = q[..., :nope] @ keys_values[..., :nope].transpose(1, 2) + q[..., nope:] @ rows[:, rank:].T
    hidden = torch.arange(rows.shape[0], device=q.device) > positions[:, None]  # [t, S]
    weights = (scores * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ keys_values[..., nope:]).transpose(0, 1).to(kv_b.dtype)
