"""What a step hands to a model, and what the model hands back."""

from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch


@dataclass(frozen=True)
class ForwardBatch:
    """One packed step of T tokens.

    token_ids: int64 [T]. attention: where tokens and pages are, by state group name. kv_pools: by group name the
    page-major pool [num_pages, num_kv_heads (of this rank), num_layers (of the group), 2, page_size, head_dim].
    logits_rows: int64 [R]; packed rows whose logits are wanted, in order.
    """

    token_ids: torch.Tensor
    attention: dict[str, AttentionBatch]
    kv_pools: dict[str, torch.Tensor]
    logits_rows: torch.Tensor
