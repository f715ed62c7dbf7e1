"""The words in which a state is described: leaves, groups of them, and the rules by which a prefix is usable.

Pure Python, as `models/state_layout.py` is, which makes these from a model's config.
"""

from dataclasses import dataclass
from enum import Enum

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
    """How tensor parallelism divides a leaf: by whole heads, or stored once although every rank has it."""

    HEAD = "head"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Leaf:
    """One tensor of a group.

    shape: of one row in one layer and one head, e.g. (2, 128) for K and V of 128 dimensions; of one checkpoint in one
    layer and head in EXACT_CHECKPOINT groups. num_heads: global heads (1 when REPLICATED). tokens_per_row: tokens that
    one row stands for, in groups that are paged by place. is_scratch: at every page boundary empty (all zero), so only
    working pages have it: it is no part of an object, of a snapshot or of a hit.
    """

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    shard: ShardKind
    num_heads: int
    tokens_per_row: int = 1
    is_scratch: bool = False

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row (or checkpoint) in one layer and one head."""
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class StateGroup:
    """Leaves that share pages, and the rule by which a prefix of them is usable.

    page_tokens: tokens that one object covers, or between two boundaries at which a checkpoint may stand.
    window_tokens: tokens before a boundary that TRAILING_PAGES needs, or 0.

    An object is [head][leaf][layer] of the leaves by head, then the replicated leaves [leaf][layer]; what a leaf has in
    a layer (and head) is [*outer, row, dim] with shape = (*outer, dim) in groups that are paged by place, else its
    shape.
    """

    name: str
    kind: StateKind
    hit_policy: HitPolicy
    page_tokens: int
    leaves: tuple[Leaf, ...]
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if len({leaf.num_heads for leaf in self.head_leaves}) > 1:
            raise ValueError(f"group {self.name!r} mixes leaves of different numbers of heads")
        for leaf in self.leaves:
            if leaf.is_scratch and self.is_paged_by_place:
                raise ValueError(
                    f"group {self.name!r}: only a group of checkpoints has scratch, not leaf {leaf.name!r}"
                )
            if self.is_paged_by_place and self.page_tokens % leaf.tokens_per_row:
                raise ValueError(f"group {self.name!r}: {self.page_tokens} tokens are no whole rows of {leaf.name!r}")

    @property
    def is_paged_by_place(self) -> bool:
        """Whether page i holds tokens [i * page_tokens, (i + 1) * page_tokens); else a page is a whole checkpoint."""
        return self.hit_policy is not HitPolicy.EXACT_CHECKPOINT

    @property
    def head_leaves(self) -> tuple[Leaf, ...]:
        """Kept leaves that are divided by head, in the object's order."""
        return tuple(leaf for leaf in self.leaves if leaf.shard is ShardKind.HEAD and not leaf.is_scratch)

    @property
    def replicated_leaves(self) -> tuple[Leaf, ...]:
        """Kept leaves that every rank has, in the object's order."""
        return tuple(leaf for leaf in self.leaves if leaf.shard is ShardKind.REPLICATED and not leaf.is_scratch)

    @property
    def scratch_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of working pages alone."""
        return tuple(leaf for leaf in self.leaves if leaf.is_scratch)

    @property
    def num_heads(self) -> int:
        """Global heads of the leaves that are divided by head; 0 without such leaves."""
        return self.head_leaves[0].num_heads if self.head_leaves else 0

    def rows(self, leaf: Leaf) -> int:
        """Rows of `leaf` in one object, layer and head."""
        return self.page_tokens // leaf.tokens_per_row if self.is_paged_by_place else 1

    def layer_bytes(self, leaf: Leaf) -> int:
        """Bytes of `leaf` in one object, layer and head."""
        return leaf.bytes_per_row * self.rows(leaf)

    @property
    def bytes_per_head(self) -> int:
        """Bytes of one head of one object, over all layers."""
        return sum(self.layer_bytes(leaf) * len(leaf.layers) for leaf in self.head_leaves)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one object over all layers and all heads (what a host slot must hold)."""
        replicated = sum(self.layer_bytes(leaf) * len(leaf.layers) for leaf in self.replicated_leaves)
        return self.num_heads * self.bytes_per_head + replicated


@dataclass(frozen=True)
class StateLayout:
    """All state groups of a model at one page size."""

    page_size: int
    groups: tuple[StateGroup, ...]
