"""Mixtures of gated experts with bounded pre-activations."""

import torch
import torch.nn.functional as F


def limited_moe_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.limited_moe_mlp`. Products in the weights' dtype, sums in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up_weights[expert]).chunk(2, dim=-1)
        inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        share = expert_weights[tokens, choices, None].float()
        out.index_add_(0, tokens, F.linear(inner, down_weights[expert]).float() * share)
    return out.to(x.dtype)


def biased_moe_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_weights: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down_weights: torch.Tensor,
    down_bias: torch.Tensor | None,
    slope: float,
    limit: float,
) -> torch.Tensor:
    """See `kernels.state_ops.StateOps.biased_moe_mlp`. Products in the weights' dtype, sums in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        gate_up = torch.addmm(gate_up_bias[expert], x[tokens], gate_up_weights[expert]).float()
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        inner = ((up + 1) * gate * torch.sigmoid(slope * gate)).to(x.dtype)
        made = (inner @ down_weights[expert]).float()
        if down_bias is not None:
            made += down_bias[expert].float()
        out.index_add_(0, tokens, made * expert_weights[tokens, choices, None].float())
    return out.to(x.dtype)
