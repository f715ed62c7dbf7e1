"""Attention of a long run of new tokens through cuDNN, which wants contiguous keys and values of known shape.

cuDNN aligns its causal mask to the first query and first key, and builds a plan for each new shape (tens of
milliseconds), so the work is cut into parts of few shapes:

    keys      [0, aligned)                    every query sees them whole; aligned is a multiple of PREFIX_UNIT
    keys      [aligned, context) + padding    a square causal problem of a multiple of RUN_UNIT rows
    queries   `lead` rows for the keys between `aligned` and the first new token, the new tokens, padding

Rows of padding are zeros, and what they give is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.triton_kernels.gather_pages import gather_pages
from kernels.triton_kernels.merge_parts import merge_parts

RUN_UNIT = 512
PREFIX_UNIT = 2048

# (q [Tq, Hq, D], k and v [Hkv, Tk, D], is_causal, scale) -> output [Tq, Hq, D], log-sum-exp float32 [Hq, Tq]
Sdpa = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Parts:
    """How a run is cut; all in tokens."""

    aligned: int
    lead: int
    queries: int
    square: int

    @classmethod
    def of(cls, num_new: int, context: int) -> "Parts":
        prefix = context - num_new
        aligned = prefix // PREFIX_UNIT * PREFIX_UNIT
        queries = _round_up(num_new, RUN_UNIT)
        return cls(aligned, prefix - aligned, queries, _round_up(prefix - aligned + queries, RUN_UNIT))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def cudnn_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Sdpa`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], k[None], v[None], None, True, 0.0, is_causal, False, scale=scale
    )
    return out[0].transpose(0, 1).contiguous(), lse[0, :, :, 0]


def long_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    table: torch.Tensor,
    context: int,
    scale: float,
    sdpa: Sdpa = cudnn_sdpa,
) -> torch.Tensor:
    """Causal attention of the last T of a sequence's `context` tokens: q [T, Hq, D] -> [T, Hq, D].

    kv_layer [pages, Hkv, 2, P, D] holds their keys and values in the pages of table int32 [pages].
    """
    num_new = q.shape[0]
    parts = Parts.of(num_new, context)
    keys, values = gather_pages(kv_layer, table, context, parts.aligned + parts.square)
    if parts.square != num_new:
        padded = q.new_zeros(parts.square, *q.shape[1:])
        padded[parts.lead : parts.lead + num_new] = q
    else:
        padded = q
    new = slice(parts.lead, parts.lead + num_new)
    out, lse = sdpa(padded, keys[:, parts.aligned :], values[:, parts.aligned :], True, scale)
    out, lse = out[new], lse[:, new]
    if not parts.aligned:
        return out
    queries = padded[parts.lead : parts.lead + parts.queries]
    before, before_lse = sdpa(queries, keys[:, : parts.aligned], values[:, : parts.aligned], False, scale)
    return merge_parts(out, lse, before[:num_new], before_lse[:, :num_new])
