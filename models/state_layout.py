"""What a model keeps between tokens, and where each byte of it lies in a page.

A *state group* is a set of tensors that live and die together, paged with one page table: its pages, or checkpoints,
are objects of one size. Each tensor of a group is a *leaf*. The layout is derived from the model's config alone, and
is the same on every rank: objects are laid out in global head order, so that a rank's part is a short list of
extents and a page written at one tensor-parallel size can be read at any other.

Pure Python: the launcher, the router and the cache manager import this, and none of them may import torch.
"""

from dataclasses import dataclass
from enum import Enum

LAYOUT_VERSION = 1

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1, "uint8": 1}


class StateKind(Enum):
    """How a state grows: FULL by token, BOUNDED not at all, TAIL between page boundaries."""

    FULL = "full"
    BOUNDED = "bounded"
    TAIL = "tail"


class HitPolicy(Enum):
    """What must be present for a prefix of L tokens to be usable, as far as one group is concerned."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    EXACT_CHECKPOINT = "exact_checkpoint"


class ShardKind(Enum):
    """How tensor parallelism divides a leaf: by whole kv heads, or stored once although every rank has it."""

    HEAD = "head"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Leaf:
    """One tensor of a group.

    shape: of one token in one layer and one head, e.g. (2, 128) for K and V of 128 dimensions (FULL); of one
    checkpoint in one layer and head for BOUNDED kinds. num_heads: global heads (1 when REPLICATED).
    """

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    shard: ShardKind
    num_heads: int

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token (or checkpoint) in one layer and one head."""
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class StateGroup:
    """Leaves that share a page table, and the rule by which a prefix of them is usable.

    page_tokens: tokens that one object covers. window_tokens: tokens before a boundary that TRAILING_PAGES needs, else 0.
    """

    name: str
    kind: StateKind
    hit_policy: HitPolicy
    page_tokens: int
    leaves: tuple[Leaf, ...]
    window_tokens: int = 0

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one object over all layers and all heads (what a host slot must hold)."""
        rows = self.page_tokens if self.kind is StateKind.FULL else 1
        return sum(leaf.bytes_per_row * len(leaf.layers) * leaf.num_heads * rows for leaf in self.leaves)


@dataclass(frozen=True)
class StateLayout:
    """All state groups of a model at one page size."""

    page_size: int
    groups: tuple[StateGroup, ...]


@dataclass(frozen=True)
class HeadShard:
    """The heads of one rank, as half-open ranges in global head order.

    stores_kv is False on a rank that replicates a kv head which a lower rank already stores (fewer heads than ranks).
    """

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    stores_kv: bool

    @property
    def num_q_heads(self) -> int:
        return self.q_end - self.q_start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_end - self.kv_start


@dataclass(frozen=True)
class Extent:
    """Bytes [offset, offset + length) of an object."""

    offset: int
    length: int
