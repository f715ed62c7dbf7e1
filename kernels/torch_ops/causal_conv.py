"""Depthwise causal convolution whose last inputs are a state of the sequence."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    state_pages: torch.Tensor,
    batch: "AttentionBatch",
    has_silu: bool = True,
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.causal_conv`. All sequences at once, whatever their lengths.

    Each sequence's K - 1 earlier inputs are put before its new ones; sequence b's run then begins at
    query_starts[b] + b * (K - 1).
    """
    kernel = weight.shape[1]
    past, num_sequences = kernel - 1, state_pages.shape[0]
    device, wide = x.device, torch.promote_types(x.dtype, torch.float32)
    order = torch.arange(num_sequences, device=device)
    begins = batch.query_starts[:-1].long() + order * past
    tokens = torch.arange(x.shape[0], device=device) + (batch.sequence_ids.long() + 1) * past
    columns = torch.arange(past, device=device)
    runs = x.new_empty((x.shape[0] + num_sequences * past, x.shape[1]))
    earlier = torch.cat([state[state_pages].flatten(1, 2) for state in states], dim=1)  # [B, C, K - 1]
    runs[begins[:, None] + columns] = earlier.transpose(1, 2).to(x.dtype)
    runs[tokens] = x
    out = torch.zeros(x.shape, dtype=wide, device=device)
    for tap in range(kernel):
        out += runs[tokens - past + tap].to(wide) * weight[:, tap].to(wide)
    ends = batch.query_starts[1:].long() + (order + 1) * past
    latest = runs[ends[:, None] - past + columns].transpose(1, 2)  # [B, C, K - 1]
    _store(states, state_pages, latest)
    return (F.silu(out) if has_silu else out).to(x.dtype)


def _store(states: tuple[torch.Tensor, ...], state_pages: torch.Tensor, latest: torch.Tensor) -> None:
    widths = [state.shape[1] * state.shape[2] for state in states]
    for state, part in zip(states, latest.split(widths, dim=1), strict=True):
        state[state_pages] = part.reshape(-1, *state.shape[1:]).to(state.dtype)
