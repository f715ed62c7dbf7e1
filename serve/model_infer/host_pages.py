"""Where a rank's part of a page lies: in its device page, and in the host slots of the whole object.

The device page of a rank holds the units that it needs, one behind the other in the object's order; the object has the
units of all ranks. Pages move between them as a few pieces, each contiguous on both sides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from models.state_layout import Extent, StateGroup, rank_extents
from serve.multi_level_cache.object_format import ObjectFormat


@dataclass(frozen=True)
class UnitRun:
    """Extent units [first, first + count) of equal length, one behind the other; offsets in bytes."""

    first: int
    count: int
    unit_bytes: int
    object_offset: int
    page_offset: int


@dataclass(frozen=True)
class Piece:
    """Bytes that are contiguous in one slot of the object and in the device page."""

    slot_index: int
    slot_offset: int
    page_offset: int
    length: int


@dataclass(frozen=True)
class Share:
    """The part of an object that a rank loads, or that it stores."""

    units: tuple[UnitRun, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class RankPages:
    """One group's pages on this rank.

    pool: uint8 [num_pages, bytes of a page on this rank], a view of the device pool. slots_per_object: host slots.
    num_layers: layers of the model up to the last one of the group.
    """

    format: ObjectFormat
    pool: torch.Tensor
    slots_per_object: int
    num_layers: int
    loads: Share
    stores: Share

    @classmethod
    def build(
        cls, group: StateGroup, form: ObjectFormat, pool: torch.Tensor, slot_bytes: int, tp: int, rank: int
    ) -> "RankPages":
        """pool: the group's pool of any dtype, page-major. Raises ValueError when its pages are not what rank needs."""
        loading, storing = rank_extents(group, tp, rank, loading=True), rank_extents(group, tp, rank)
        flat = pool.view(torch.uint8).view(pool.shape[0], -1)
        if flat.shape[1] != sum(extent.length for extent in loading):
            raise ValueError(f"group {group.name!r}: a device page has {flat.shape[1]} bytes, not those of its units")
        return cls(
            form,
            flat,
            form.num_slots(slot_bytes),
            1 + max(layer for leaf in group.leaves for layer in leaf.layers),
            _share(form, loading, loading, slot_bytes),
            _share(form, storing, loading, slot_bytes),
        )


def _share(form: ObjectFormat, wanted: Sequence[Extent], held: Sequence[Extent], slot_bytes: int) -> Share:
    """The units inside `wanted`; `held` are the extents that the device page is made of."""
    runs: list[UnitRun] = []
    offset = 0
    for index, length in enumerate(form.unit_bytes):
        if length and any(_contains(extent, offset, length) for extent in wanted):
            _append(runs, UnitRun(index, 1, length, offset, _page_offset(held, offset)))
        offset += length
    return Share(tuple(runs), tuple(_pieces(runs, slot_bytes)))


def _contains(extent: Extent, offset: int, length: int) -> bool:
    return extent.offset <= offset and offset + length <= extent.offset + extent.length


def _page_offset(held: Sequence[Extent], offset: int) -> int:
    """Where byte `offset` of the object lies in a page made of the `held` extents."""
    start = 0
    for extent in held:
        if extent.offset <= offset < extent.offset + extent.length:
            return start + offset - extent.offset
        start += extent.length
    raise ValueError(f"byte {offset} of the object is not on this rank")


def _append(runs: list[UnitRun], unit: UnitRun) -> None:
    """Add a unit, to the last run where it continues that one."""
    last = runs[-1] if runs else None
    if last is not None and last.first + last.count == unit.first and last.unit_bytes == unit.unit_bytes:
        length = last.count * last.unit_bytes
        if (last.object_offset + length, last.page_offset + length) == (unit.object_offset, unit.page_offset):
            runs[-1] = UnitRun(last.first, last.count + 1, last.unit_bytes, last.object_offset, last.page_offset)
            return
    runs.append(unit)


def _pieces(runs: Sequence[UnitRun], slot_bytes: int) -> Iterator[Piece]:
    """The runs' bytes, joined where they touch on both sides, cut where a slot ends."""
    for object_offset, page_offset, length in _joined(runs):
        done = 0
        while done < length:
            slot_index, slot_offset = divmod(object_offset + done, slot_bytes)
            part = min(length - done, slot_bytes - slot_offset)
            yield Piece(slot_index, slot_offset, page_offset + done, part)
            done += part


def _joined(runs: Sequence[UnitRun]) -> list[tuple[int, int, int]]:
    """(object offset, page offset, length)."""
    spans: list[tuple[int, int, int]] = []
    for run in runs:
        length = run.count * run.unit_bytes
        if spans:
            first, page_first, so_far = spans[-1]
            if (first + so_far, page_first + so_far) == (run.object_offset, run.page_offset):
                spans[-1] = (first, page_first, so_far + length)
                continue
        spans.append((run.object_offset, run.page_offset, length))
    return spans
