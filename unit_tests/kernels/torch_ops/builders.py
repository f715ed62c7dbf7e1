"""Steps of several sequences, and pages of one leaf, for the tests of operations on states."""

from collections.abc import Sequence

import torch

from kernels.interface import AttentionBatch
from unit_tests.kernels.builders import paged_case, poisoned

STEPS = {
    "decoding": ([70, 1, 33], [1, 1, 1]),
    "a prompt": ([150], [150]),
    "a later chunk": ([150], [67]),
    "mixed": ([41, 9, 130, 7], [1, 9, 67, 3]),
}


def step_of(
    generator: torch.Generator, context_lens: Sequence[int], query_lens: Sequence[int], page_size: int = 16
) -> AttentionBatch:
    """A step with scattered pages."""
    shape = {"num_kv_heads": 1, "head_dim": 2, "page_size": page_size, "dtype": torch.float32}
    return paged_case(generator, context_lens, query_lens, is_filled=False, **shape).batch


def spread(batch: AttentionBatch, rows: list[torch.Tensor], ratio: int = 1) -> torch.Tensor:
    """A leaf [pages, P / ratio, D] whose rows of sequence b are rows[b]; all else is no number."""
    per_page = batch.page_size // ratio
    num_pages = int(batch.page_table.where(batch.page_table < 2**20, 0).max()) + 1
    leaf = poisoned(num_pages, per_page, rows[0].shape[1], dtype=rows[0].dtype)
    for table, values in zip(batch.page_table, rows, strict=True):
        for row, value in enumerate(values):
            leaf[int(table[row // per_page]), row % per_page] = value
    return leaf


def runs_of(batch: AttentionBatch, packed: torch.Tensor) -> list[torch.Tensor]:
    """Packed values by sequence."""
    return list(packed.split(batch.query_starts.diff().tolist()))
