"""Layouts against published sizes; shards and extents as partitions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.state_layout import (
    Extent,
    HitPolicy,
    Leaf,
    ShardKind,
    StateGroup,
    StateKind,
    StateLayout,
    derive_layout,
    namespace,
    rank_extents,
    shard_heads,
)
from unit_tests.models.builders import tiny_config
from unit_tests.models.test_config import LLAMA_31_8B, QWEN3_8B, QWEN3_30B_A3B, read

DIGEST = bytes(32)


def bytes_per_token(config) -> int:
    (group,) = derive_layout(config, 64, "bfloat16").groups
    return group.bytes_per_page // 64


def test_bytes_a_token_are_the_published_ones(tmp_path):
    assert bytes_per_token(tiny_config()) == 23_040
    assert bytes_per_token(read(tmp_path, LLAMA_31_8B)) == 131_072
    assert bytes_per_token(read(tmp_path, QWEN3_8B)) == 147_456
    assert bytes_per_token(read(tmp_path, QWEN3_30B_A3B)) == 98_304


def test_the_layout_of_smollm2():
    layout = derive_layout(tiny_config(), 16, "float32")
    leaf = Leaf("kv", tuple(range(30)), (2, 64), "float32", ShardKind.HEAD, 3)
    assert layout == StateLayout(16, (StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 16, (leaf,)),))


def test_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="dtype"):
        derive_layout(tiny_config(), 16, "float12")
    with pytest.raises(ValueError, match="page size"):
        derive_layout(tiny_config(), 0, "float32")


def test_smollm2_on_two_ranks_is_unequal():
    first, second = (shard_heads(9, 3, 2, rank) for rank in range(2))
    assert (first.num_kv_heads, first.num_q_heads, first.stores_kv) == (2, 6, True)
    assert (second.num_kv_heads, second.num_q_heads, second.stores_kv) == (1, 3, True)
    assert (second.q_start, second.kv_start) == (6, 2)


def test_fewer_heads_than_ranks_are_replicated_and_stored_once():
    shards = [shard_heads(8, 2, 4, rank) for rank in range(4)]
    assert [(s.kv_start, s.kv_end) for s in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [(s.q_start, s.q_end) for s in shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [s.stores_kv for s in shards] == [True, False, True, False]


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(ValueError, match="cannot be spread"):
        shard_heads(4, 2, 5, 0)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_query_heads_are_partitioned_and_keep_their_kv_head(num_kv, group, tp):
    if tp > num_kv and -(-tp // num_kv) > group:
        return
    shards = [shard_heads(num_kv * group, num_kv, tp, rank) for rank in range(tp)]
    assert shards[0].q_start == 0
    assert shards[-1].q_end == num_kv * group
    assert all(a.q_end == b.q_start for a, b in itertools.pairwise(shards))
    assert all(s.num_q_heads >= 1 for s in shards)
    for shard in shards:
        local_group = shard.num_q_heads // shard.num_kv_heads
        for head in range(shard.q_start, shard.q_end):
            local = (head - shard.q_start) // local_group
            assert shard.kv_start + local == head // group
    stored = [head for s in shards if s.stores_kv for head in range(s.kv_start, s.kv_end)]
    assert stored == list(range(num_kv))


def covered(extents: list[Extent]) -> set[int]:
    return {byte for extent in extents for byte in range(extent.offset, extent.offset + extent.length)}


@given(st.integers(1, 6), st.integers(1, 8))
def test_what_the_ranks_store_is_every_byte_once(num_kv, tp):
    (group,) = derive_layout(tiny_config(num_layers=2, num_kv_heads=num_kv, head_dim=4), 2, "bfloat16").groups
    stored = [covered(rank_extents(group, tp, rank)) for rank in range(tp)]
    assert sum(map(len, stored)) == group.bytes_per_page
    assert set().union(*stored) == set(range(group.bytes_per_page))
    loaded = [rank_extents(group, tp, rank, loading=True) for rank in range(tp)]
    assert all(len(extents) == 1 for extents in loaded)
    assert all(s <= covered(extents) for s, extents in zip(stored, loaded, strict=True))


def test_extents_of_smollm2_on_two_ranks():
    (group,) = derive_layout(tiny_config(), 64, "bfloat16").groups
    head = 30 * 2 * 64 * 64 * 2
    assert rank_extents(group, 1, 0) == [Extent(0, 3 * head)]
    assert rank_extents(group, 2, 0) == [Extent(0, 2 * head)]
    assert rank_extents(group, 2, 1) == [Extent(2 * head, head)]
    assert rank_extents(group, 4, 1) == []
    assert rank_extents(group, 4, 1, loading=True) == [Extent(0, head)]


def test_a_replicated_part_is_stored_by_whole_layers_and_loaded_whole():
    leaf = Leaf("latent", (0, 1, 2), (9,), "bfloat16", ShardKind.REPLICATED, 1)
    group = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 3, (leaf,))
    assert [rank_extents(group, 2, rank) for rank in range(2)] == [[Extent(0, 108)], [Extent(108, 54)]]
    assert rank_extents(group, 4, 3) == []
    assert rank_extents(group, 4, 3, loading=True) == [Extent(0, 162)]


def test_heads_and_replicated_part_together_merge_where_they_touch():
    leaves = (
        Leaf("kv", (0,), (2, 4), "bfloat16", ShardKind.HEAD, 2),
        Leaf("shared", (0,), (8,), "bfloat16", ShardKind.REPLICATED, 1),
    )
    group = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 1, leaves)
    assert rank_extents(group, 1, 0) == [Extent(0, 48)]
    assert rank_extents(group, 2, 1, loading=True) == [Extent(16, 32)]
    assert rank_extents(group, 2, 0) == [Extent(0, 16), Extent(32, 16)]
    assert rank_extents(group, 2, 1) == [Extent(16, 16)]


def name_of(config=None, page_size=64, dtype="bfloat16", digest=DIGEST) -> bytes:
    config = config or tiny_config()
    return namespace(derive_layout(config, page_size, dtype), config, digest, dtype)


def test_a_namespace_is_stable_and_ignores_what_no_state_depends_on():
    assert name_of() == name_of(tiny_config())
    assert name_of() == name_of(tiny_config(eos_token_ids=(1, 2), bos_token_id=4, dtype="float16"))


def test_a_namespace_changes_with_all_that_a_state_depends_on():
    from models.config import MoeConfig, RopeConfig

    names = [
        name_of(),
        name_of(page_size=32),
        name_of(dtype="float32"),
        name_of(digest=bytes(31) + b"x"),
        name_of(tiny_config(rope=RopeConfig("default", 10000.0, 64))),
        name_of(tiny_config(rope=RopeConfig("linear", 100000.0, 64, factor=2.0))),
        name_of(tiny_config(rms_norm_eps=1e-6)),
        name_of(tiny_config(num_q_heads=3)),
        name_of(tiny_config(qk_norm=True)),
        name_of(tiny_config(moe=MoeConfig(4, 2, 32, True))),
        name_of(tiny_config(moe=MoeConfig(4, 2, 32, False))),
    ]
    assert len(set(names)) == len(names)
