"""Which experts a token goes to, and with what weights."""

import torch
import torch.nn.functional as F

from models.config import ExpertScore, MoeConfig

_EPS = 1e-20


def route(
    logits: torch.Tensor, moe: MoeConfig, correction: torch.Tensor | None, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int64 [T, K] and their weights float32 [T, K] from router logits float32 [T, E].

    correction [E] is added to the scores for choosing alone (DeepSeek-V3, section 2.1.2). With it a group of experts is
    as good as its best two, without it as its best one. fixed int64 [T, K]: experts that are chosen already.
    """
    scores = _scores(logits, moe.score)
    ids = fixed if fixed is not None else _choose(scores if correction is None else scores + correction, moe)
    weights = scores.gather(1, ids)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPS)
    return ids, weights * moe.routed_scale


def _scores(logits: torch.Tensor, score: ExpertScore) -> torch.Tensor:
    if score is ExpertScore.SOFTMAX:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if score is ExpertScore.SIGMOID else F.softplus(logits).sqrt()


def _choose(scores: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    if moe.num_groups > 1:
        grouped = scores.unflatten(1, (moe.num_groups, -1))  # [T, groups, experts of a group]
        counted = min(2 if moe.has_correction else 1, grouped.shape[2])
        worth = grouped.topk(counted, dim=-1).values.sum(dim=-1)
        best = worth.topk(moe.top_groups, dim=-1).indices
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        scores = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    return scores.topk(moe.top_k, dim=-1).indices
