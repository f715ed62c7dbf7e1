"""A first forward before the first request, so that no user pays for compilation and first touches."""

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from kernels.interface import AttentionBatch, Run
from models.forward import ForwardBatch
from models.source import Progress
from serve.model_infer.attention_state.coordinator import StateCoordinator

# Beside what `KernelBackend.warmup` compiled: a few sizes for kernels that are compiled when they run.
_ROW_COUNTS = (1, 2, 16)
# (sequences, new tokens each, whether the context is the longest): see the choices in `kernels.cuda_backend` and in
# the launchers of its attention kernels.
_VARIANTS = (
    *((num_rows, 1, True) for num_rows in (1, 2, 4, 8, 16, 24, 32, 64, 96)),
    *((1, length, is_long) for length in (32, 64, 100, 200, 700) for is_long in (False, True)),
    *((17, length, False) for length in (3, 100)),
    *((1, 2048, is_long) for is_long in (False, True)),
)


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


def warm_up_variants(
    model: _Forward,
    states: StateCoordinator,
    batch_max_tokens: int,
    longest: int,
    device: torch.device,
    num_threads: int,
    progress: Progress,
) -> None:
    """Run a batch for each variant of the kernels that steps on a GPU choose by size, so that all get compiled.

    For models with full attention only, whose pages can all be page 0. longest: tokens of the longest request.
    num_threads: compilers at once; 1 where ranks have to go through their collectives in one order. progress is called
    with ("kernels", batches done, batches in all).
    """
    shapes = [shape for shape in _VARIANTS if shape[0] * shape[1] <= batch_max_tokens and shape[1] <= longest]

    @torch.inference_mode()
    def run(shape: tuple[int, int, bool]) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        num_rows, length, is_long = shape
        model.forward(_batch(states, num_rows, length, device, longest if is_long else length))

    with ThreadPoolExecutor(num_threads, thread_name_prefix="warm-up") as pool:
        for done, _ in enumerate(pool.map(run, shapes), 1):
            progress("kernels", done, len(shapes))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _batch(
    states: StateCoordinator, num_rows: int, length: int, device: torch.device, context: int | None = None
) -> ForwardBatch:
    """`num_rows` sequences whose last `length` tokens, of `context` or as many, are new, all on page 0."""
    total, context = num_rows * length, context or length
    before = context - length
    runs = tuple(Run(row, row * length, length, context) for row in range(num_rows) if length > 1)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * length
    attention = {
        group.name: AttentionBatch(
            query_starts=starts,
            context_lens=torch.full((num_rows,), context, dtype=torch.int32, device=device),
            page_table=torch.zeros(
                (num_rows, -(-context // group.page_tokens) * group.is_paged_by_place), dtype=torch.int32, device=device
            ),
            positions=before + torch.arange(total, dtype=torch.int64, device=device) % length,
            sequence_ids=torch.arange(total, dtype=torch.int32, device=device) // length,
            max_query_len=length,
            max_context_len=context,
            page_size=group.page_tokens,
            runs=runs,
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
