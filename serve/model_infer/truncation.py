"""Drawing a token from a truncated distribution, without sorting the vocabulary when that can be helped.

Order of the rules as in vLLM: temperature, min_p, top_k, top_p; each renormalises what the one before has left. Tokens
of equal probability are ranked by id. All of it is a function of the row alone: no result depends on the batch.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from serve.model_infer.rng import exponentials_batched
from serve.model_infer.row_draw import BLOCK, FIRST_BLOCK_ID

# Candidate widths tried in turn; the last resort is the whole vocabulary. A nucleus mostly has fewer than 128 tokens.
_WIDTHS = (128, 4096)
_GROUP = 32  # logits that share one maximum in the search for candidates
_ID_BITS = 32


@dataclass(frozen=True)
class TruncationParams:
    """One entry a row [R]: top_k int64 (0: off), top_p and min_p float32 (1 and 0: off).

    has_nuclei, has_floors: False where the host knows that no row has top_p without top_k, or min_p.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    has_nuclei: bool = True
    has_floors: bool = True

    def take(self, rows: torch.Tensor) -> "TruncationParams":
        """The entries of `rows` int64 [N]."""
        return replace(self, top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


def choose(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index int64 [R] drawn in proportion to weights float64 [R, N] >= 0; see `row_draw.choose`."""
    return (weights / noise).argmax(dim=-1)


def draw_full(logits: torch.Tensor, maxima: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [R] from softmax(logits float32 [R, V]); maxima float32 [R] of the rows.

    keys: int64 [R], bits of `rng.draw_keys`. See `RowDrawer` for the race in two steps.
    """
    blocks = _by_blocks(torch.exp(logits - maxima[:, None]))
    num_blocks = blocks.shape[1]
    places = torch.arange(num_blocks + BLOCK, device=logits.device)
    ids = torch.where(places < num_blocks, places + FIRST_BLOCK_ID, places - num_blocks)
    noise = exponentials_batched(keys, ids)
    block = choose(blocks.sum(dim=-1).double(), noise[:, :num_blocks])
    inner = blocks[torch.arange(len(block), device=block.device), block].double()
    return block * BLOCK + choose(inner, noise[:, num_blocks:])


def _by_blocks(weights: torch.Tensor) -> torch.Tensor:
    """Weights [R, V] as [R, blocks, BLOCK], the last block filled up with zeros."""
    padding = -weights.shape[1] % BLOCK
    if padding:
        weights = F.pad(weights, (0, padding))
    return weights.view(len(weights), -1, BLOCK)


def draw_truncated(
    logits: torch.Tensor, maxima: torch.Tensor, keys: torch.Tensor, params: TruncationParams
) -> torch.Tensor:
    """Token ids int64 [R] from the truncated softmax of logits float32 [R, V] (temperature applied).

    On a GPU the host waits once for each width of candidates that some row needs.
    """
    num_rows, vocab_size = logits.shape
    floors = maxima + params.min_p.log()  # -inf where off
    masses = _masses(logits, maxima, floors, params)
    token_ids = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    left = torch.arange(num_rows, device=logits.device)
    for width in (*_WIDTHS, vocab_size):
        rows = left
        part = logits if len(rows) == num_rows else logits[rows]
        values, ids, num_certain = top_candidates(part, min(width, vocab_size))
        weights, is_covered = _kept_weights(
            values, num_certain, maxima[rows], floors[rows], masses[rows], params.take(rows)
        )
        if width >= vocab_size:
            is_covered.fill_(True)
        index = choose(weights, exponentials_batched(keys[rows], ids))
        token_ids[rows] = ids.gather(1, index[:, None])[:, 0]
        left = rows[~is_covered]
        if not len(left):
            break
    return token_ids


def top_candidates(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` largest logits of each row, sorted: values float32 [R, width], ids int64 [R, width], sure int64 [R].

    Equal values stand in order of ids. The first `sure` entries of a row are exact; behind them an equal value may
    have been left out.
    """
    num_rows, vocab_size = logits.shape
    if width >= vocab_size // 2 or width * _GROUP > vocab_size:
        keys = _sort_keys(logits, torch.arange(vocab_size, device=logits.device).expand(num_rows, -1))
        values, ids = _from_keys(keys.topk(min(width, vocab_size), dim=-1).values)
        return values, ids, torch.full((num_rows,), width, device=logits.device)
    padding = -vocab_size % _GROUP
    padded = F.pad(logits, (0, padding), value=-torch.inf) if padding else logits
    stride = padded.shape[1] // _GROUP
    # Group g holds ids g, g + stride, ...: the `width` groups of largest maxima hold the `width` largest logits.
    group_maxima, groups = padded.view(num_rows, _GROUP, stride).amax(dim=1).topk(width, dim=-1)
    offsets = torch.arange(_GROUP, device=logits.device) * stride
    ids = (groups[:, None, :] + offsets[None, :, None]).view(num_rows, -1)
    keys = _sort_keys(padded.gather(1, ids), ids)
    values, ids = _from_keys(keys.topk(width, dim=-1).values)
    num_certain = (values > group_maxima[:, -1:]).sum(dim=-1)
    return values, ids, num_certain


def _masses(logits: torch.Tensor, maxima: torch.Tensor, floors: torch.Tensor, params: TruncationParams) -> torch.Tensor:
    """Sum of exp(logit - maximum) over the tokens that min_p leaves, float64 [R]; by blocks, see `draw_full`.

    Only top_p without top_k asks for it: zeros when no row does.
    """
    if not params.has_nuclei:
        return torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    weights = torch.exp(logits - maxima[:, None])
    if params.has_floors:
        weights = weights.masked_fill_(logits < floors[:, None], 0.0)
    return _by_blocks(weights).sum(dim=-1).double().cumsum(dim=-1)[:, -1]


def _kept_weights(
    values: torch.Tensor,
    num_certain: torch.Tensor,
    maxima: torch.Tensor,
    floors: torch.Tensor,
    masses: torch.Tensor,
    params: TruncationParams,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float64 [R, N] of the sorted candidates, 0 for those cut, and which rows the candidates suffice for."""
    ranks = torch.arange(values.shape[1], device=values.device)
    has_top_k = params.top_k > 0
    limits = torch.where(has_top_k, params.top_k, torch.iinfo(torch.int64).max)
    is_kept = (values >= floors[:, None]) & (ranks < limits[:, None])
    # A candidate that is certain was cut, or top_k ends before the doubtful ones: what follows is cut as well.
    is_covered = (is_kept.sum(dim=-1) < num_certain) | (has_top_k & (limits <= num_certain))
    weights = torch.exp(values - maxima[:, None]).double().masked_fill_(~is_kept, 0.0)
    cumulative = weights.cumsum(dim=-1)
    mass = torch.where(has_top_k, cumulative[:, -1], masses)
    nucleus = (cumulative - weights < (params.top_p.double() * mass)[:, None]) | (ranks == 0)
    is_kept &= nucleus | (params.top_p >= 1.0)[:, None]
    is_covered |= ~has_top_k & (is_kept.sum(dim=-1) < num_certain)
    return weights.masked_fill_(~is_kept, 0.0), is_covered


def _sort_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort by value, then by falling id. values float32, ids int64 < 2**32."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 equals 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << _ID_BITS) | (((1 << _ID_BITS) - 1) - ids)


def _from_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = ((1 << _ID_BITS) - 1) - (keys & ((1 << _ID_BITS) - 1))
    ordered = keys >> _ID_BITS
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(torch.int32).view(torch.float32), ids
