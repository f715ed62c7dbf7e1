"""Builders and fakes for the tests of the worker."""

from dataclasses import dataclass, field

import numpy as np
import torch

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, StateLayout
from serve.ipc.messages import JoinRow
from serve.model_infer.input_batch import InputBatch
from serve.model_infer.page_table import PageTable
from serve.types import SamplingParams

CPU = torch.device("cpu")


@dataclass
class FakeTable:
    """The part of a request table that a worker reads, in plain Python."""

    num_tokens: int = 4096
    slots: dict[int, np.ndarray] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    params: dict[int, SamplingParams] = field(default_factory=dict)

    def fill(self, slot: int, tokens: list[int], params: SamplingParams | None = None) -> int:
        self.slots[slot] = np.zeros(self.num_tokens, dtype=np.uint32)
        self.slots[slot][: len(tokens)] = tokens
        self.generations[slot] = self.generations.get(slot, 0) + 1
        self.params[slot] = params or greedy()
        return self.generations[slot]

    def append(self, slot: int, place: int, token: int) -> None:
        self.slots[slot][place] = token

    def generation(self, slot: int) -> int:
        return self.generations[slot]

    def tokens(self, slot: int) -> np.ndarray:
        return self.slots[slot]

    def sampling(self, slot: int) -> SamplingParams:
        return self.params[slot]


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **changes})  # type: ignore[arg-type]


def make_layout(
    page_size: int = 4,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    names: tuple[str, ...] = ("full",),
) -> StateLayout:
    leaf = Leaf("kv", tuple(range(num_layers)), (2, head_dim), "float32", ShardKind.HEAD, num_kv_heads)
    groups = tuple(StateGroup(name, StateKind.FULL, HitPolicy.ALL_PAGES, page_size, (leaf,)) for name in names)
    return StateLayout(page_size, groups)


def make_batch(
    table: FakeTable,
    max_rows: int = 8,
    num_pages: int = 1000,
    page_size: int = 4,
    max_pages: int = 2,
    names: tuple[str, ...] = ("full",),
) -> InputBatch:
    tables = {name: PageTable(name, page_size, num_pages, max_rows, max_pages) for name in names}
    leaves = {name: {"kv": torch.zeros(1)} for name in names}
    return InputBatch(tables, {}, leaves, table, max_rows, CPU)


def join(
    row: int, slot: int, generation: int, num_prompt: int, pages: list[int], num_cached: int = 0, num_known: int = 0
) -> JoinRow:
    return JoinRow(row, slot, generation, num_prompt, num_known or num_prompt, num_cached, {"full": pages})
