"""Mixture of experts: tokens grouped by expert, so that each expert's weights are read once."""

import torch

from kernels.cpu.linear_op import LinearOp


def moe_mlp(
    gate_up_linear: LinearOp,
    linear: LinearOp,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> torch.Tensor:
    """See `KernelBackend.moe_mlp`. Contributions are summed in float32, in the order of the experts' numbers."""
    choices = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    tokens = order // choices
    grouped = x.index_select(0, tokens)  # [T * K, H], by expert
    shares = torch.empty_like(grouped)
    counts = torch.bincount(expert_ids.flatten(), minlength=gate_up_weights.shape[0]).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = grouped[start : start + count]
        hidden = x.new_empty((count, down_weights.shape[2]))
        gate_up_linear.run(rows, gate_up_weights[expert], hidden)
        linear.run(hidden, down_weights[expert], shares[start : start + count])
        start += count
    factors = expert_weights.flatten().index_select(0, order).float()
    out = torch.zeros(x.shape, dtype=torch.float32)
    out.index_add_(0, tokens, shares.float() * factors[:, None])
    return out.to(x.dtype)
