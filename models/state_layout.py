"""What a model keeps between tokens, and where each byte of it lies in a page.

A *state group* is a set of tensors that live and die together, paged with one page table: its pages, or checkpoints,
are objects of one size. Each tensor of a group is a *leaf*. The layout is derived from the model's config alone, and
is the same on every rank: objects are laid out in global head order, so that a rank's part is a short list of
extents and a page written at one tensor-parallel size can be read at any other.

Pure Python: the launcher, the router and the cache manager import this, and none of them may import torch.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from models.layer_states import LayerState, layer_states
from models.state_groups import (
    DTYPE_BYTES,
    HitPolicy,
    Leaf,
    ShardKind,
    StateGroup,
    StateKind,
    StateLayout,
)

if TYPE_CHECKING:
    from models.config import ModelConfig

__all__ = [
    "DTYPE_BYTES",
    "Extent",
    "HeadShard",
    "HitPolicy",
    "Leaf",
    "ShardKind",
    "StateGroup",
    "StateKind",
    "StateLayout",
    "derive_layout",
    "group_heads",
    "group_states",
    "namespace",
    "page_multiple",
    "rank_extents",
    "shard_heads",
    "split_range",
]

LAYOUT_VERSION = 2


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
    """The state groups of `config` with pages of `page_size` tokens and caches in `dtype` (a key of DTYPE_BYTES).

    What each layer keeps stands in `models/layer_states.py`; here layers that keep the same share a leaf, and leaves of
    one group share its pages. FULL groups come first, then BOUNDED, then TAIL ones. Raises ValueError on an unknown
    dtype or a page size that is not positive or no multiple of `page_multiple`.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if page_size < 1:
        raise ValueError(f"page size must be positive, not {page_size}")
    kept = [(layer, state) for layer in range(config.num_layers) for state in layer_states(config, layer, dtype)]
    multiple = page_multiple(config)
    if page_size % multiple:
        raise ValueError(f"page size {page_size} is no multiple of {multiple}, as this model's states need")
    return group_states(kept, page_size)


def group_states(kept: Sequence[tuple[int, LayerState]], page_size: int) -> StateLayout:
    """The groups of these (layer, what it keeps). Raises ValueError where layers disagree on what a group holds."""
    names = dict.fromkeys(state.group.name for _, state in kept)
    groups = [_group(page_size, [entry for entry in kept if entry[1].group.name == name]) for name in names]
    order = list(StateKind)
    return StateLayout(page_size, tuple(sorted(groups, key=lambda group: order.index(group.kind))))


def page_multiple(config: "ModelConfig") -> int:
    """Tokens that the page size must be a multiple of: the compression ratios that divide a sequence."""
    states = (state for layer in range(config.num_layers) for state in layer_states(config, layer, "float32"))
    return math.lcm(*(state.tokens_per_row for state in states))


def _group(page_size: int, kept: list[tuple[int, LayerState]]) -> StateGroup:
    """The group of these (layer, state): a leaf for each name, with all layers that have it."""
    rule = kept[0][1].group
    leaves: dict[LayerState, list[int]] = {}
    for layer, state in kept:
        leaves.setdefault(state, []).append(layer)
    if any(state.group != rule for state in leaves) or len({state.name for state in leaves}) != len(leaves):
        raise ValueError(f"state group {rule.name!r}: layers disagree on what it holds")
    return StateGroup(
        rule.name,
        rule.kind,
        rule.hit_policy,
        page_size,
        tuple(state.leaf(tuple(layers)) for state, layers in leaves.items()),
        rule.window_tokens,
    )


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


def group_heads(group: StateGroup, tp: int, rank: int) -> tuple[int, int, bool]:
    """Heads [start, end) of `group` that `rank` holds, and whether it stores them; (0, 0, False) without such
    leaves."""
    if not group.num_heads:
        return 0, 0, False
    shard = shard_heads(max(group.num_heads, tp) * group.num_heads, group.num_heads, tp, rank)
    return shard.kv_start, shard.kv_end, shard.stores_kv


def rank_extents(group: StateGroup, tp: int, rank: int, *, loading: bool = False) -> list[Extent]:
    """The bytes of one object of `group` that `rank` stores, or that it needs when `loading`; adjacent ones merged.

    An object is [head][leaf][layer] of what the leaf has in a layer, then the replicated leaves. Of a replicated head
    the lowest rank holding it stores it; of the replicated part rank r stores the r-th slice (whole layers of a leaf,
    which are the units that are checked).
    """
    start, end, stores = group_heads(group, tp, rank)
    extents: list[Extent] = []
    if stores or loading:
        extents.append(Extent(start * group.bytes_per_head, (end - start) * group.bytes_per_head))
    layers = [group.layer_bytes(leaf) for leaf in group.replicated_leaves for _ in leaf.layers]
    first, last = (0, len(layers)) if loading else split_range(len(layers), tp, rank)
    head_part = group.num_heads * group.bytes_per_head
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
