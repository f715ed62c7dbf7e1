"""What the cache tiers know of a state group: how large its objects are and in which units they are checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.state_layout import StateGroup, StateLayout

SLOT_ALIGNMENT = 4096  # direct I/O and page-locked memory work in whole memory pages
MAX_SLOTS_PER_OBJECT = 32
WASTE_TOLERANCE = 0.01


@dataclass(frozen=True)
class ObjectFormat:
    """One state group's objects: the same on every rank and in every tier.

    unit_bytes: lengths of the object's extent units, one behind the other, each with a checksum of its own.
    """

    group: str
    group_index: int
    page_tokens: int
    unit_bytes: tuple[int, ...]

    @property
    def object_bytes(self) -> int:
        return sum(self.unit_bytes)

    def num_slots(self, slot_bytes: int) -> int:
        """Host slots that one object takes; none for an object of no bytes."""
        return -(-self.object_bytes // slot_bytes)


def object_formats(layout: StateLayout) -> tuple[ObjectFormat, ...]:
    """Formats of all groups that have bytes to keep, `group_index` being the position in the layout."""
    formats = (
        ObjectFormat(group.name, index, group.page_tokens, _unit_bytes(group))
        for index, group in enumerate(layout.groups)
    )
    return tuple(entry for entry in formats if entry.object_bytes)


def _unit_bytes(group: StateGroup) -> tuple[int, ...]:
    """A unit for each head (over all layers), then one for each layer of each replicated leaf."""
    replicated = [group.layer_bytes(leaf) for leaf in group.replicated_leaves for _ in leaf.layers]
    return tuple([group.bytes_per_head] * group.num_heads + replicated)


def choose_slot_bytes(formats: Sequence[ObjectFormat]) -> int:
    """Slot size that wastes least over the groups, weighed by the groups' bytes.

    Among sizes within `WASTE_TOLERANCE` of the best the largest is taken: fewer slots, fewer and larger copies.
    Raises ValueError when there is nothing to store.
    """
    sizes = [entry.object_bytes for entry in formats if entry.object_bytes]
    if not sizes:
        raise ValueError("the model has no state to cache")
    candidates = {_aligned(-(-size // parts)) for size in sizes for parts in range(1, MAX_SLOTS_PER_OBJECT + 1)}
    floor = _aligned(-(-max(sizes) // MAX_SLOTS_PER_OBJECT))
    waste = {slot: _waste(sizes, slot) for slot in candidates if slot >= floor}
    best = min(waste.values())
    return max(slot for slot, share in waste.items() if share <= best + WASTE_TOLERANCE)


def _aligned(size: int) -> int:
    return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _waste(sizes: Sequence[int], slot_bytes: int) -> float:
    """Share of the slots' bytes that stays unused when each group stores one object."""
    taken = sum(-(-size // slot_bytes) * slot_bytes for size in sizes)
    return 1 - sum(sizes) / taken
