"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): one step, and chunks of a prompt.

With state S [Dk, Dv], decay a_t = exp(g_t) and rate b_t a token does S <- a_t S, u_t = b_t (v_t - k_t S),
S <- S + k_t u_t^T, and reads o_t = q_t S.
"""

from typing import TYPE_CHECKING

import torch

from kernels.torch_ops.paging import split_runs

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch

CHUNK = 64
_NORM_EPS = 1e-6


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
    state_pages: torch.Tensor,
    batch: "AttentionBatch",
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.gated_delta_rule`."""
    group = state.shape[2]
    wide_q = _normalise(q) * q.shape[-1] ** -0.5
    inputs = (wide_q.repeat_interleave(group, dim=1), _normalise(k).repeat_interleave(group, dim=1), v.float())
    inputs = (*inputs, log_decay.float(), rate.float())
    if batch.max_query_len == 1:
        return _step(inputs, state, state_pages).to(v.dtype)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    runs = split_runs(batch)
    if len(runs.singles):
        picked = tuple(part[runs.single_tokens] for part in inputs)
        out[runs.single_tokens] = _step(picked, state, state_pages[runs.singles])
    for index, tokens in runs.longer:
        page = state_pages[index]
        current = state[page].flatten(0, 1)  # [Hv, Dk, Dv]
        for start in range(tokens.start, tokens.stop, CHUNK):
            part = slice(start, min(start + CHUNK, tokens.stop))
            out[part], current = _chunk(*(tensor[part].transpose(0, 1) for tensor in inputs), current)
        state[page] = current.view(state.shape[1:])
    return out.to(v.dtype)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


def _step(inputs: tuple[torch.Tensor, ...], state: torch.Tensor, state_pages: torch.Tensor) -> torch.Tensor:
    """One token of each sequence: q, k [B, Hv, Dk], v [B, Hv, Dv], log_decay and rate [B, Hv]; updates the state."""
    q, k, v, log_decay, rate = inputs
    current = state[state_pages].flatten(1, 2) * log_decay.exp()[..., None, None]  # [B, Hv, Dk, Dv]
    known = torch.einsum("bhk,bhkv->bhv", k, current)
    update = (v - known) * rate[..., None]
    current += k[..., None] * update[..., None, :]
    state[state_pages] = current.view(-1, *state.shape[1:])
    return torch.einsum("bhk,bhkv->bhv", q, current)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, rate: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """C tokens of one sequence: q, k [H, C, Dk], v [H, C, Dv], log_decay and rate [H, C], state [H, Dk, Dv].

    All updates u of the chunk come from one triangular system: with G the running sum of g,
    (1 + A) u = b (v - e^G k S) where A_ij = b_i e^(G_i - G_j) k_i k_j for j < i. -> out [C, H, Dv] and the new state.
    """
    total = log_decay.cumsum(dim=1)  # [H, C]
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(later, float("-inf")).exp()  # [H, C, C]
    system = rate[..., None] * decay * (k @ k.transpose(1, 2))
    since = total.exp()[..., None]
    wanted = rate[..., None] * (v - since * (k @ state))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = since * (q @ state) + (decay * (q @ k.transpose(1, 2))) @ updates
    rest = (total[:, -1:] - total).exp()[..., None]
    state = total[:, -1].exp()[:, None, None] * state + (k * rest).transpose(1, 2) @ updates
    return out.transpose(0, 1), state
