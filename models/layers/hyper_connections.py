"""Manifold-constrained hyper-connections (Xie et al. 2026; DeepSeek-V4, section 2.2): a residual of several streams."""

import torch
import torch.nn.functional as F

from models.config import HyperConnectionConfig
from models.weight_plan import WeightPlan


def plan_hyper_connection(plan: WeightPlan, key: str, prefix: str, hyper: HyperConnectionConfig, hidden: int) -> None:
    """Mixing weights of one half of a layer, in float32."""
    rows = (2 + hyper.num_streams) * hyper.num_streams
    plan.add_whole(f"{key}.fn", f"{prefix}.fn", (rows, hyper.num_streams * hidden), torch.float32)
    plan.add_whole(f"{key}.base", f"{prefix}.base", (rows,), torch.float32)
    plan.add_whole(f"{key}.scale", f"{prefix}.scale", (3,), torch.float32)


def plan_hyper_head(plan: WeightPlan, key: str, prefix: str, hyper: HyperConnectionConfig, hidden: int) -> None:
    """Weights of the last collapse, in float32."""
    shape = (hyper.num_streams, hyper.num_streams * hidden)
    plan.add_whole(f"{key}.fn", f"{prefix}.hc_fn", shape, torch.float32)
    plan.add_whole(f"{key}.base", f"{prefix}.hc_base", (hyper.num_streams,), torch.float32)
    plan.add_whole(f"{key}.scale", f"{prefix}.hc_scale", (1,), torch.float32)


class HyperConnection:
    """Collapses the streams before one half of a layer, and spreads its output over them after it."""

    def __init__(self, weights: dict[str, torch.Tensor], key: str, hyper: HyperConnectionConfig, eps: float) -> None:
        """eps: of the norm of the streams."""
        self.hyper = hyper
        self.fn = weights[f"{key}.fn"]
        self.base = weights[f"{key}.base"]
        self.scale = weights[f"{key}.scale"]
        self.eps = eps

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, N, H] -> the half's input [T, H], and what `spread` wants: shares [T, N] and mixing [T, N, N]."""
        count = self.hyper.num_streams
        mixed = F.linear(_normed(streams, self.eps), self.fn)
        parts = zip(mixed.split([count, count, count**2], 1), self.base.split([count, count, count**2]), strict=True)
        before, after, mixing = (part * scale + base for (part, base), scale in zip(parts, self.scale, strict=True))
        collapsed = _collapsed(streams, before.sigmoid() + self.hyper.eps)
        return collapsed, 2 * after.sigmoid(), self._doubly_stochastic(mixing.view(-1, count, count))

    @staticmethod
    def spread(streams: torch.Tensor, output: torch.Tensor, shares: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
        """New streams [T, N, H]: the old ones mixed, and the half's output [T, H] added by share."""
        kept = mixing.transpose(1, 2) @ streams.float()
        return (shares[..., None] * output[:, None].float() + kept).to(streams.dtype)

    def _doubly_stochastic(self, logits: torch.Tensor) -> torch.Tensor:
        """Sinkhorn-Knopp: rows and columns of [T, N, N] in turn are made to sum to 1."""
        eps = self.hyper.eps
        mixing = logits.softmax(dim=-1) + eps
        mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.hyper.num_iterations - 1):
            mixing = mixing / (mixing.sum(dim=-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
        return mixing


class HyperHead:
    """The last collapse of the streams."""

    def __init__(self, weights: dict[str, torch.Tensor], key: str, hyper: HyperConnectionConfig, eps: float) -> None:
        self.fn = weights[f"{key}.fn"]
        self.base = weights[f"{key}.base"]
        self.scale = weights[f"{key}.scale"]
        self.hyper = hyper
        self.eps = eps

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [T, N, H] -> [T, H]."""
        shares = (F.linear(_normed(streams, self.eps), self.fn) * self.scale + self.base).sigmoid() + self.hyper.eps
        return _collapsed(streams, shares)


def _normed(streams: torch.Tensor, eps: float) -> torch.Tensor:
    """All streams of a token as one vector of mean square 1: float32 [T, N * H]."""
    flat = streams.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + eps)


def _collapsed(streams: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return (shares[..., None] * streams.float()).sum(dim=1).to(streams.dtype)
