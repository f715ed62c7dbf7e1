"""The contract of a state manager: one state group on one rank."""

import math
from collections.abc import Iterator

import torch

from kernels.cpu.memory import empty_huge
from models.state_layout import Leaf, ShardKind, StateGroup, group_heads

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class AttentionState:
    """Owns the device memory of one state group; the only writer of its layout, never of which page is whose.

    This class is all that groups which are paged by place need (full attention, sliding windows): the complete pages
    below a boundary are its state, so nothing is copied there. `CheckpointState` adds working pages.

    The caller (the worker's one thread) guarantees: `allocate` once, before anything else; page ids below the number
    allocated. Ids come from plans and are the same on every rank: a manager never allocates, matches or evicts.

    The pool is one tensor of objects of this rank, each [head of this rank][leaf][layer] and then [replicated
    leaf][layer]. Behind its last page lies a spare one that no plan names: padding of captured steps writes there.
    """

    def __init__(self, group: StateGroup, tp: int, rank: int, device: torch.device) -> None:
        """Raises ValueError for leaves whose numbers would not be aligned within a page."""
        self.group = group
        self.device = device
        start, end, _ = group_heads(group, tp, rank)
        self.num_heads = end - start
        replicated = sum(group.layer_bytes(leaf) * len(leaf.layers) for leaf in group.replicated_leaves)
        self._object_bytes = self.num_heads * group.bytes_per_head + replicated
        self._memory: torch.Tensor | None = None
        self._leaves: dict[str, torch.Tensor] = {}
        for leaf, offset in self._offsets():
            size = TORCH_DTYPES[leaf.dtype].itemsize
            if offset % size or self._object_bytes % size or (self.num_heads > 1 and group.bytes_per_head % size):
                raise ValueError(f"state group {group.name!r}: leaf {leaf.name!r} is not aligned to {size} bytes")

    @property
    def bytes_per_page(self) -> int:
        """Device bytes of one page on this rank, scratch included."""
        return self._object_bytes + sum(4 * math.prod(self._scratch_shape(leaf)) for leaf in self.group.scratch_leaves)

    def allocate(self, num_pages: int) -> None:
        """Make the pool. On a CPU memory is taken when a page is first written, and zero until then."""
        self._memory = self._zeros((num_pages + 1, self._object_bytes), torch.uint8)
        self._leaves = {leaf.name: self._view(self._memory, leaf, offset) for leaf, offset in self._offsets()}
        for leaf in self.group.scratch_leaves:
            self._leaves[leaf.name] = self._zeros((num_pages + 1, *self._scratch_shape(leaf)), TORCH_DTYPES[leaf.dtype])

    @property
    def pool(self) -> torch.Tensor:
        """uint8 [num_pages, bytes of this rank's part of an object]; raises RuntimeError before `allocate`."""
        return self._padded()[:-1]

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """Views as `ForwardBatch.leaves` describes them, with the spare page as their last; the same in every call."""
        self._padded()
        return self._leaves

    def _padded(self) -> torch.Tensor:
        if self._memory is None:
            raise RuntimeError(f"state group {self.group.name!r} has no pool yet")
        return self._memory

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            # Fresh memory: in some used before, a stale NaN would reach a result as 0 * NaN.
            return empty_huge(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _offsets(self) -> Iterator[tuple[Leaf, int]]:
        """Kept leaves with the byte in a page where their first head begins."""
        offset = 0
        for leaf in self.group.head_leaves:
            yield leaf, offset
            offset += self.group.layer_bytes(leaf) * len(leaf.layers)
        offset = self.num_heads * self.group.bytes_per_head
        for leaf in self.group.replicated_leaves:
            yield leaf, offset
            offset += self.group.layer_bytes(leaf) * len(leaf.layers)

    def _view(self, memory: torch.Tensor, leaf: Leaf, offset: int) -> torch.Tensor:
        """[pages, heads, layers, *outer, rows, dim], or [pages, heads, layers, *shape] of a checkpoint."""
        shape = leaf.shape
        if self.group.is_paged_by_place:
            shape = (*shape[:-1], self.group.rows(leaf), shape[-1])
        dtype = TORCH_DTYPES[leaf.dtype]
        size = dtype.itemsize
        heads = self.num_heads if leaf.shard is ShardKind.HEAD else 1
        inner = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        strides = (memory.shape[1] // size, self.group.bytes_per_head // size, math.prod(shape), *inner)
        numbers = memory.view(-1).view(dtype)
        first = numbers.storage_offset() + offset // size
        return numbers.as_strided((len(memory), heads, len(leaf.layers), *shape), strides, first)

    def _scratch_shape(self, leaf: Leaf) -> tuple[int, ...]:
        return (self.num_heads if leaf.shard is ShardKind.HEAD else 1, len(leaf.layers), *leaf.shape)
