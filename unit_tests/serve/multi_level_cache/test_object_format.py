"""Slots are sized to waste little; units follow the layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, StateLayout
from serve.multi_level_cache.object_format import (
    MAX_SLOTS_PER_OBJECT,
    SLOT_ALIGNMENT,
    ObjectFormat,
    choose_slot_bytes,
    object_formats,
)


def form(size: int) -> ObjectFormat:
    return ObjectFormat("g", 0, 64, (size,))


def test_one_group_of_aligned_objects_wastes_nothing():
    assert choose_slot_bytes([form(1 << 20)]) == 1 << 20


def test_two_groups_share_a_divisor():
    slot = choose_slot_bytes([form(6 << 20), form(4 << 20)])
    assert slot == 2 << 20


def test_an_odd_object_is_cut_so_that_little_is_lost():
    formats = [form(1 << 20), form((1 << 20) + 4096)]
    slot = choose_slot_bytes(formats)
    taken = sum(each.num_slots(slot) * slot for each in formats)
    assert taken < 1.2 * sum(each.object_bytes for each in formats)


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=4))
def test_slots_are_aligned_and_objects_take_few(sizes: list[int]):
    formats = [form(size) for size in sizes]
    slot = choose_slot_bytes(formats)
    assert slot % SLOT_ALIGNMENT == 0
    assert all(1 <= each.num_slots(slot) <= MAX_SLOTS_PER_OBJECT for each in formats)


def test_a_model_without_state_is_refused():
    with pytest.raises(ValueError, match="no state"):
        choose_slot_bytes([])


def test_units_are_heads_and_layers_of_replicated_leaves():
    head = Leaf("kv", (0, 1, 2), (2, 8), "bfloat16", ShardKind.HEAD, 4)
    scale = Leaf("scale", (0, 1, 2), (2,), "float32", ShardKind.HEAD, 4)
    latent = Leaf("latent", (0, 1, 2), (16,), "bfloat16", ShardKind.REPLICATED, 1)
    full = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 16, (head, scale, latent))
    tail = StateGroup("tail", StateKind.TAIL, HitPolicy.EXACT_CHECKPOINT, 64, ())
    state = StateGroup("state", StateKind.BOUNDED, HitPolicy.EXACT_CHECKPOINT, 64, (head,))
    formats = object_formats(StateLayout(16, (full, tail, state)))
    assert [(each.group, each.group_index) for each in formats] == [("full", 0), ("state", 2)], "the tail is empty"
    assert formats[0].unit_bytes == (3 * 16 * (32 + 8),) * 4 + (16 * 32,) * 3
    assert [each.object_bytes for each in formats] == [full.bytes_per_page, state.bytes_per_page]
