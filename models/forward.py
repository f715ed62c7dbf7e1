"""What a step hands to a model, and what the model hands back."""

from dataclasses import dataclass, field

import torch

from kernels.interface import AttentionBatch


@dataclass(frozen=True)
class ForwardBatch:
    """One packed step of T tokens and B sequences; everything about states is by the name of the state group.

    token_ids: int64 [T]. attention: where tokens and pages are; a group of checkpoints has the same without a page
    table ([B, 0]). logits_rows: int64 [R]; packed rows whose logits are wanted, in order.

    leaves: by group and leaf the pool as one strided view, of this rank's heads (one of a replicated leaf) and the
    leaf's layers in order. FULL and window groups [pages, heads, layers, *outer, rows, dim] (K/V: outer is 2, K first),
    groups of checkpoints [pages, heads, layers, *shape]. The views are the same objects in every step.
    state_pages: int64 [B], of each group of checkpoints: the page that holds the sequence's state after its
    computed tokens, and shall hold it after this step's. A sequence without any has a page of zeros.
    """

    token_ids: torch.Tensor
    attention: dict[str, AttentionBatch]
    leaves: dict[str, dict[str, torch.Tensor]]
    logits_rows: torch.Tensor
    state_pages: dict[str, torch.Tensor] = field(default_factory=dict)
