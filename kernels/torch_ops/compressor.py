"""Compressed key/value entries (DeepSeek-V4, sections 2.3.1 and 2.3.2), made token by token.

An entry is the softmax-gated mean of the values of a window of r tokens, by channel; with overlap, of those of the
window before too (in projections of their own). What is known of an unfinished window is kept reduced to (greatest
gate, sum of weights, weighted sum of values) a channel, which later tokens extend: a state of one size, whatever the
phase in the window. A sum of 0 marks that nothing is in it yet.
"""

from typing import TYPE_CHECKING

import torch

from kernels.torch_ops.paging import split_runs

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch

_GATE, _WEIGHT, _VALUE = 0, 1, 2


def compress(
    values: torch.Tensor,
    gates: torch.Tensor,
    ratio: int,
    state: torch.Tensor,
    ahead: torch.Tensor | None,
    state_pages: torch.Tensor,
    batch: "AttentionBatch",
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.compress`."""
    width = state.shape[-1]
    out = torch.empty((values.shape[0], width), dtype=torch.float32, device=values.device)
    if batch.max_query_len == 1:
        return _step(values, gates, batch.positions, ratio, state, ahead, state_pages)
    runs = split_runs(batch)
    if len(runs.singles):
        tokens = runs.single_tokens
        picked = (values[tokens], gates[tokens], batch.positions[tokens])
        out[tokens] = _step(*picked, ratio, state, ahead, state_pages[runs.singles])
    for index, tokens in runs.longer:
        first = int(batch.positions[tokens.start])
        entries = _run(values[tokens], gates[tokens], first, ratio, state, ahead, int(state_pages[index]))
        windows = batch.positions[tokens] // ratio - first // ratio
        out[tokens] = entries[windows]
    return out


def _step(
    values: torch.Tensor,
    gates: torch.Tensor,
    positions: torch.Tensor,
    ratio: int,
    state: torch.Tensor,
    ahead: torch.Tensor | None,
    state_pages: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence -> what its window's entry would be if it ended here, float32 [B, D]."""
    width = state.shape[-1]
    current = _merge(state[state_pages], _reduced(values[:, None, -width:], gates[:, None, -width:]))
    is_end = ((positions + 1) % ratio == 0)[:, None, None]
    if ahead is None:
        state[state_pages] = current.masked_fill(is_end, 0)
    else:
        following = _merge(ahead[state_pages], _reduced(values[:, None, :width], gates[:, None, :width]))
        state[state_pages] = torch.where(is_end, following, current)
        ahead[state_pages] = following.masked_fill(is_end, 0)
    return _mean(current)


def _run(
    values: torch.Tensor,
    gates: torch.Tensor,
    first: int,
    ratio: int,
    state: torch.Tensor,
    ahead: torch.Tensor | None,
    page: int,
) -> torch.Tensor:
    """Tokens [first, first + t) of one sequence -> entries [n, D] of the windows that they touch, the last one perhaps
    unfinished."""
    width, before = state.shape[-1], first % ratio
    after = -(before + values.shape[0]) % ratio
    values = torch.nn.functional.pad(values.float(), (0, 0, before, after)).unflatten(0, (-1, ratio))
    gates = torch.nn.functional.pad(gates.float(), (0, 0, before, after), value=float("-inf")).unflatten(0, (-1, ratio))
    current = _reduced(values[..., -width:], gates[..., -width:])  # [n, 3, D]
    current[0] = _merge(state[page], current[0])
    rest = torch.zeros_like(current[0])
    if ahead is None:
        state[page] = current[-1] if after else rest
        return _mean(current)
    following = _reduced(values[..., :width], gates[..., :width])
    following[0] = _merge(ahead[page], following[0])
    current[1:] = _merge(following[:-1], current[1:])
    state[page], ahead[page] = (current[-1], following[-1]) if after else (following[-1], rest)
    return _mean(current)


def _reduced(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """values and gates [N, r, D] reduced to [N, 3, D]; gates of -inf count for nothing."""
    gates = gates.float()
    greatest = gates.amax(dim=1)
    base = greatest.masked_fill(greatest == float("-inf"), 0)
    weights = (gates - base[:, None]).exp()
    return torch.stack((base, weights.sum(dim=1), (weights * values.float()).sum(dim=1)), dim=1)


def _merge(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Union of two reduced sets [..., 3, D]."""
    nothing = float("-inf")
    gates = [part[..., _GATE, :].masked_fill(part[..., _WEIGHT, :] == 0, nothing) for part in (one, other)]
    greatest = torch.maximum(*gates)
    base = greatest.masked_fill(greatest == nothing, 0)
    scales = [(gate - base).exp() for gate in gates]
    weight, value = (one[..., index, :] * scales[0] + other[..., index, :] * scales[1] for index in (_WEIGHT, _VALUE))
    return torch.stack((base, weight, value), dim=-2)


def _mean(reduced: torch.Tensor) -> torch.Tensor:
    """[N, 3, D] -> [N, D]; 0 of nothing."""
    weight = reduced[:, _WEIGHT]
    return reduced[:, _VALUE] / weight.masked_fill(weight == 0, 1)
