"""Pools as bytes of objects, and views of them by leaf."""

import pytest
import torch

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, rank_extents
from serve.model_infer.attention_state.base import AttentionState
from serve.model_infer.memory_info import resident_bytes
from unit_tests.serve.model_infer.builders import CPU, make_layout

HEAD, REPLICATED = ShardKind.HEAD, ShardKind.REPLICATED
LEAVES = (
    Leaf("kv", (0, 1, 3), (2, 8), "bfloat16", HEAD, 3),
    Leaf("scale", (1, 3), (1,), "float32", HEAD, 3, tokens_per_row=2),
    Leaf("latent", (0, 2), (5,), "bfloat16", REPLICATED, 1),
    Leaf("sparse", (2,), (6,), "float32", REPLICATED, 1, tokens_per_row=4),
)
MIXED = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 4, LEAVES)


def test_the_pool_is_page_major():
    state = AttentionState(make_layout(page_size=16, num_layers=3).groups[0], 1, 0, CPU)
    state.allocate(5)
    assert state.leaves["kv"].shape == (6, 2, 3, 2, 16, 8)  # the spare page is the last
    assert state.leaves["kv"].is_contiguous()
    assert state.pool.shape == (5, state.bytes_per_page)
    assert state.bytes_per_page == state.leaves["kv"][0].numel() * 4
    assert not state.leaves["kv"].any()


def test_a_rank_holds_its_heads_only():
    group = make_layout(num_kv_heads=3).groups[0]
    shares = [AttentionState(group, 2, rank, CPU).bytes_per_page for rank in range(2)]
    assert shares == [group.bytes_per_page * 2 // 3, group.bytes_per_page // 3]


def test_leaves_of_several_shapes_share_a_page_and_do_not_overlap():
    state = AttentionState(MIXED, 1, 0, CPU)
    state.allocate(2)
    shapes = {name: tuple(leaf.shape[1:]) for name, leaf in state.leaves.items()}
    assert shapes == {"kv": (3, 3, 2, 4, 8), "scale": (3, 2, 2, 1), "latent": (1, 2, 4, 5), "sparse": (1, 1, 1, 6)}
    for leaf in state.leaves.values():
        assert not leaf.any()
        leaf.fill_(1.0)
    assert sum(leaf[0].numel() * leaf.element_size() for leaf in state.leaves.values()) == MIXED.bytes_per_page
    ones = torch.ones(1)
    assert all(bool((leaf == ones.to(leaf.dtype)).all()) for leaf in state.leaves.values())


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_a_ranks_page_is_the_bytes_that_its_extents_name(tp: int):
    whole = AttentionState(MIXED, 1, 0, CPU)
    whole.allocate(1)
    whole.pool.copy_(torch.randint(0, 256, whole.pool.shape, dtype=torch.uint8))
    for rank in range(tp):
        part = AttentionState(MIXED, tp, rank, CPU)
        part.allocate(1)
        extents = rank_extents(MIXED, tp, rank, loading=True)
        part.pool[0] = torch.cat([whole.pool[0, each.offset : each.offset + each.length] for each in extents])
        first = min(rank, 2) if tp >= 3 else 2 * rank
        if tp < 5:
            heads = part.leaves["kv"].shape[1]
            expected = whole.leaves["kv"][:, first : first + heads].view(torch.int16)
            assert torch.equal(part.leaves["kv"].view(torch.int16)[0], expected[0])
        assert torch.equal(part.leaves["latent"].view(torch.int16)[0], whole.leaves["latent"].view(torch.int16)[0])
        assert torch.equal(part.leaves["sparse"].view(torch.int32)[0], whole.leaves["sparse"].view(torch.int32)[0])


def test_memory_is_not_used_before_it_is_written():
    state = AttentionState(make_layout(page_size=64, num_layers=16, head_dim=64).groups[0], 1, 0, CPU)
    before = resident_bytes()
    state.allocate(1000)  # about a GiB
    assert resident_bytes() - before < 64 << 20
    state.leaves["kv"][7].fill_(1.0)
    assert resident_bytes() - before < 64 << 20


def test_no_pool_before_allocation():
    state = AttentionState(make_layout().groups[0], 1, 0, CPU)
    with pytest.raises(RuntimeError, match="no pool yet"):
        state.pool
    with pytest.raises(RuntimeError, match="no pool yet"):
        state.leaves


def test_numbers_that_would_not_be_aligned_are_refused():
    leaves = (Leaf("a", (0,), (3,), "int8", REPLICATED, 1), Leaf("b", (0,), (3,), "float32", REPLICATED, 1))
    with pytest.raises(ValueError, match="'b' is not aligned"):
        AttentionState(StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 1, leaves), 1, 0, CPU)
