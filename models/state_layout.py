"""What a model keeps between tokens, and where each byte of it lies in a page.

A *state group* is a set of tensors that live and die together, paged with one page table: its pages, or checkpoints,
are objects of one size. Each tensor of a group is a *leaf*. The layout is derived from the model's config alone, and
is the same on every rank: objects are laid out in global head order, so that a rank's part is a short list of
extents and a page written at one tensor-parallel size can be read at any other.

Pure Python: the launcher, the router and the cache manager import this, and none of them may import torch.
"""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config import ModelConfig

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

    page_tokens: tokens that one object covers. window_tokens: tokens before a boundary that TRAILING_PAGES needs, or 0.
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


def derive_layout(config: "ModelConfig", page_size: int, dtype: str) -> StateLayout:
    """The state groups of `config` with pages of `page_size` tokens and K/V in `dtype` (a key of DTYPE_BYTES).

    Every family served so far has one FULL group of keys (after norm and rotation) and values. Raises ValueError on an
    unknown dtype or a page size that is not positive.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if page_size < 1:
        raise ValueError(f"page size must be positive, not {page_size}")
    leaf = Leaf(
        name="kv",
        layers=tuple(range(config.num_layers)),
        shape=(2, config.head_dim),
        dtype=dtype,
        shard=ShardKind.HEAD,
        num_heads=config.num_kv_heads,
    )
    group = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, page_size, (leaf,))
    return StateLayout(page_size, (group,))


def split_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of [0, total) cut into contiguous parts, the earlier ones larger by at most one."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def shard_heads(num_q: int, num_kv: int, tp: int, rank: int) -> HeadShard:
    """Heads of `rank` out of `tp`: whole kv heads with their query heads, in contiguous ranges that may be unequal.

    With fewer kv heads than ranks each kv head is replicated on several ranks, which share its query heads; the lowest
    of them stores it. Raises ValueError if some rank would have no query head.
    """
    group = num_q // num_kv
    if tp <= num_kv:
        start, end = split_range(num_kv, tp, rank)
        return HeadShard(start * group, end * group, start, end, stores_kv=True)
    head = next(h for h in range(num_kv) if rank < split_range(tp, num_kv, h)[1])
    first, last = split_range(tp, num_kv, head)
    if last - first > group:
        raise ValueError(f"{num_q} query heads cannot be spread over {tp} ranks")
    start, end = split_range(group, last - first, rank - first)
    return HeadShard(head * group + start, head * group + end, head, head + 1, stores_kv=rank == first)


def rank_extents(group: StateGroup, tp: int, rank: int, *, loading: bool = False) -> list[Extent]:
    """The bytes of one object of `group` that `rank` stores, or that it needs when `loading`; adjacent ones merged.

    An object is [kv_head][leaf][layer][k|v][token][dim], then the replicated leaves. Of a replicated head the lowest
    rank holding it stores it; of the replicated part rank r stores the r-th slice (whole layers of a leaf, which are
    the units that are checked).
    """
    rows = group.page_tokens if group.kind is StateKind.FULL else 1
    heads = [leaf for leaf in group.leaves if leaf.shard is ShardKind.HEAD]
    extents: list[Extent] = []
    head_part = 0
    if heads:
        num_heads = heads[0].num_heads
        if any(leaf.num_heads != num_heads for leaf in heads):
            raise ValueError(f"group {group.name!r} mixes leaves of different numbers of heads")
        per_head = sum(leaf.bytes_per_row * len(leaf.layers) * rows for leaf in heads)
        head_part = per_head * num_heads
        shard = shard_heads(max(num_heads, tp) * num_heads, num_heads, tp, rank)
        if shard.stores_kv or loading:
            extents.append(Extent(shard.kv_start * per_head, shard.num_kv_heads * per_head))
    layers = [
        leaf.bytes_per_row * leaf.num_heads * rows
        for leaf in group.leaves
        if leaf.shard is ShardKind.REPLICATED
        for _ in leaf.layers
    ]
    first, last = (0, len(layers)) if loading else split_range(len(layers), tp, rank)
    extents.append(Extent(head_part + sum(layers[:first]), sum(layers[first:last])))
    return _merge(extents)


def _merge(extents: list[Extent]) -> list[Extent]:
    merged: list[Extent] = []
    for extent in extents:
        if not extent.length:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.offset + last.length == extent.offset:
            merged[-1] = Extent(last.offset, last.length + extent.length)
        else:
            merged.append(extent)
    return merged


_NOT_IN_STATES = ("eos_token_ids", "bos_token_id", "dtype")


def namespace(layout: StateLayout, config: "ModelConfig", weights_digest: bytes, compute_dtype: str) -> bytes:
    """Canonical bytes of all that a page's content depends on besides its tokens; the same at every TP size.

    Covers the layout version, every group and leaf, the page size, the digest of the weights, the compute dtype, and
    every config value but those that only end or begin texts.
    """
    facts = {
        "layout_version": LAYOUT_VERSION,
        "layout": asdict(layout),
        "config": {key: value for key, value in config.to_dict().items() if key not in _NOT_IN_STATES},
        "weights_digest": weights_digest.hex(),
        "compute_dtype": compute_dtype,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=lambda item: item.value).encode()
