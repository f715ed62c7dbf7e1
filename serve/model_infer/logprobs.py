"""Log-probabilities of the model's own distribution, before temperature, penalties and truncation."""

from collections.abc import Sequence

import numpy as np
import torch

from serve.ipc.messages import TokenLogprobs
from serve.model_infer.row_draw import largest

_ROWS_AT_ONCE = 64  # bounds the work memory when a long prompt is scored


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row: logits float32 [N, V], token_ids int64 [N], num_top [N] alternatives wanted (0: none).

    rank is 1 for the most probable token; tokens as probable as the chosen one do not count against it.
    """
    if logits.device.type == "cpu":
        rows = zip(logits.numpy(), token_ids.tolist(), num_top, strict=True)
        return [_entry(row, token, count) for row, token, count in rows]
    entries: list[TokenLogprobs] = []
    for first in range(0, len(logits), _ROWS_AT_ONCE):
        last = first + _ROWS_AT_ONCE
        entries += _entries(logits[first:last], token_ids[first:last], num_top[first:last])
    return entries


def _entry(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """The entry of one row float32 [V], on the CPU."""
    shifted = logits - logits.max()
    normalizer = np.log(np.exp(shifted).sum())
    chosen = shifted[token_id]
    top_ids = largest(shifted, min(num_top, len(shifted))) if num_top else np.zeros(0, dtype=np.int64)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(chosen - normalizer),
        rank=int(np.count_nonzero(shifted > chosen)) + 1,
        top_ids=top_ids.tolist(),
        top_logprobs=(shifted[top_ids] - normalizer).tolist(),
    )


def _entries(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    width = min(max(num_top, default=0), logits.shape[1])
    values, ids = logits.topk(width, dim=-1)
    columns = zip(
        token_ids.tolist(),
        (chosen - normalizers)[:, 0].tolist(),
        ranks.tolist(),
        ids.tolist(),
        (values - normalizers).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token, logprob, rank, top_ids[:count], top_logprobs[:count])
        for token, logprob, rank, top_ids, top_logprobs, count in columns
    ]
