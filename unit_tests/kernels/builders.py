"""Random inputs for kernel tests, and the comparison that they all use."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.jit import InstructionSet, best_instruction_set
from kernels.interface import AttentionBatch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]
ORDER = [InstructionSet.AVX512_BF16, InstructionSet.AVX512, InstructionSet.GENERIC]
AVAILABLE = ORDER[ORDER.index(best_instruction_set()) :]


@lru_cache
def cpu_backend(instruction_set: InstructionSet, num_threads: int) -> CpuBackend:
    """One backend for all tests of a kind, so that kernels are compiled once."""
    return CpuBackend(num_threads=num_threads, instruction_set=instruction_set)


def seed_by(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator seeded by the test's id: fresh inputs for every case, the same in every run."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """||actual - expected|| / ||expected|| is within the dtype's tolerance, and all is finite."""
    assert actual.shape == expected.shape
    assert bool(actual.isfinite().all()), "not finite"
    wide, reference = actual.double(), expected.double()
    error = float((wide - reference).norm() / reference.norm().clamp_min(1e-30))
    assert error < (tolerance if tolerance is not None else TOLERANCE[actual.dtype]), error


@dataclass
class PagedCase:
    """Sequences with a context and new tokens, scattered over a poisoned page-major pool of several layers."""

    batch: AttentionBatch
    pool: torch.Tensor  # [pages, Hkv, layers, 2, P, D]
    layer: int

    @property
    def kv_layer(self) -> torch.Tensor:
        return self.pool[:, :, self.layer]

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(page, row) of each new token."""
        batch = self.batch
        index = batch.positions // batch.page_size
        return batch.page_table[batch.sequence_ids.long(), index].long(), batch.positions % batch.page_size


def paged_case(
    generator: torch.Generator,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    is_filled: bool,
    num_layers: int = 2,
) -> PagedCase:
    """Pages in random order; rows that no context covers hold NaN; page-table padding points far outside.

    is_filled: rows of the context hold random keys and values (else everything is NaN, as before a store).
    """
    needed = [-(-length // page_size) for length in context_lens]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages, generator=generator).to(torch.int32)
    table = torch.full((len(needed), max(needed) + 2), 2**30, dtype=torch.int32)
    pool = poisoned(num_pages, num_kv_heads, num_layers, 2, page_size, head_dim, dtype=dtype)
    taken = 0
    for row, (count, length) in enumerate(zip(needed, context_lens, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        if is_filled:
            for index in range(count):
                rows = min(page_size, length - index * page_size)
                pool[int(table[row, index]), :, :, :, :rows] = randn(
                    generator, num_kv_heads, num_layers, 2, rows, head_dim, dtype=dtype
                )
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    pairs = list(zip(context_lens, query_lens, strict=True))
    batch = AttentionBatch(
        query_starts=starts,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        page_table=table,
        positions=torch.cat([torch.arange(context - new, context) for context, new in pairs]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(query_lens)).to(torch.int32),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        page_size=page_size,
    )
    return PagedCase(batch, pool, layer=num_layers - 1)


def cos_sin_table(num_positions: int, half: int) -> torch.Tensor:
    angles = torch.arange(num_positions)[:, None] * (10_000.0 ** (-torch.arange(half) / max(half, 1)))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().contiguous()
