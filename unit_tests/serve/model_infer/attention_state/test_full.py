import pytest
import torch

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind
from serve.model_infer.attention_state.full import FullAttentionState
from serve.model_infer.memory_info import resident_bytes
from unit_tests.serve.model_infer.builders import CPU, make_layout


def test_the_pool_is_page_major():
    state = FullAttentionState(make_layout(page_size=16, num_layers=3).groups[0], 2, CPU)
    state.allocate(5)
    assert state.pool.shape == (5, 2, 3, 2, 16, 8)
    assert state.pool.is_contiguous()
    assert state.bytes_per_page == state.pool[0].numel() * 4
    assert not state.pool.any()


def test_a_rank_holds_its_heads_only():
    group = make_layout(num_kv_heads=3).groups[0]
    assert FullAttentionState(group, 1, CPU).bytes_per_page * 3 == group.bytes_per_page


def test_memory_is_not_used_before_it_is_written():
    state = FullAttentionState(make_layout(page_size=64, num_layers=16, head_dim=64).groups[0], 2, CPU)
    before = resident_bytes()
    state.allocate(1000)  # about a GiB
    assert resident_bytes() - before < 64 << 20
    state.pool[7].fill_(1.0)
    assert resident_bytes() - before < 64 << 20


def test_no_pool_before_allocation():
    with pytest.raises(RuntimeError, match="no pool yet"):
        FullAttentionState(make_layout().groups[0], 2, CPU).pool


def test_bfloat16_is_held_as_such():
    leaf = Leaf("kv", (0,), (2, 8), "bfloat16", ShardKind.HEAD, 2)
    group = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 4, (leaf,))
    state = FullAttentionState(group, 2, CPU)
    state.allocate(2)
    assert state.pool.dtype == torch.bfloat16


def test_a_layout_that_it_cannot_hold_is_refused():
    leaf = Leaf("latent", (0,), (512,), "bfloat16", ShardKind.REPLICATED, 1)
    group = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 4, (leaf,))
    with pytest.raises(NotImplementedError, match="'full'"):
        FullAttentionState(group, 1, CPU)
