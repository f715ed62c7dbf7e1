"""A first forward before the first request, so that no user pays for compilation and first touches."""

from typing import Protocol

import torch

from kernels.interface import AttentionBatch
from models.forward import ForwardBatch
from serve.model_infer.attention_state.coordinator import StateCoordinator

# Beside what `KernelBackend.warmup` compiled: a few sizes for kernels that are compiled when they run.
_ROW_COUNTS = (1, 2, 16)


class _Forward(Protocol):
    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


@torch.inference_mode()
def warm_up(model: _Forward, states: StateCoordinator, batch_max_tokens: int, device: torch.device) -> None:
    """Run one short prompt and a few decode batches through `model`, on page 0 of every group.

    Nothing refers to page 0 yet, a row of a page is written before it is read, and a working page is cleared or
    restored before it is used: no result can depend on this.
    """
    page_tokens = min(group.page_tokens for group in states.layout.groups)
    model.forward(_batch(states, 1, min(page_tokens, batch_max_tokens), device))
    for num_rows in _ROW_COUNTS:
        if num_rows <= batch_max_tokens:
            model.forward(_batch(states, num_rows, 1, device))


def _batch(states: StateCoordinator, num_rows: int, length: int, device: torch.device) -> ForwardBatch:
    """`num_rows` sequences of `length` tokens each, all on page 0."""
    total = num_rows * length
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * length
    attention = {
        group.name: AttentionBatch(
            query_starts=starts,
            context_lens=torch.full((num_rows,), length, dtype=torch.int32, device=device),
            page_table=torch.zeros((num_rows, int(group.is_paged_by_place)), dtype=torch.int32, device=device),
            positions=torch.arange(total, dtype=torch.int64, device=device) % length,
            sequence_ids=torch.arange(total, dtype=torch.int32, device=device) // length,
            max_query_len=length,
            max_context_len=length,
            page_size=group.page_tokens,
        )
        for group in states.layout.groups
    }
    logits_rows = starts[1:].to(torch.int64) - 1
    token_ids = torch.zeros(total, dtype=torch.int64, device=device)
    state_pages = {
        group.name: torch.zeros(num_rows, dtype=torch.int64, device=device)
        for group in states.layout.groups
        if not group.is_paged_by_place
    }
    return ForwardBatch(token_ids, attention, states.leaves(), logits_rows, state_pages)
