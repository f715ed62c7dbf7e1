"""Working pages and checkpoints."""

import torch

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind
from serve.model_infer.attention_state.checkpoint import CheckpointState
from unit_tests.serve.model_infer.builders import CPU

LEAVES = (
    Leaf("recurrent", (0, 1), (2, 4, 4), "float32", ShardKind.HEAD, 2),
    Leaf("conv", (0, 1), (6, 3), "bfloat16", ShardKind.HEAD, 2),
    Leaf("partial", (1,), (4, 5), "float32", ShardKind.REPLICATED, 1, is_scratch=True),
)
GROUP = StateGroup("recurrent", StateKind.BOUNDED, HitPolicy.EXACT_CHECKPOINT, 16, LEAVES)


def make_state(num_pages: int = 6) -> CheckpointState:
    state = CheckpointState(GROUP, 1, 0, CPU)
    state.allocate(num_pages)
    for leaf in state.leaves.values():
        leaf.fill_(float("nan"))
    return state


def test_scratch_is_no_part_of_an_object_but_takes_memory():
    state = make_state()
    assert GROUP.bytes_per_page == 2 * 2 * (2 * 4 * 4 * 4 + 6 * 3 * 2)
    assert state.pool.shape[1] == GROUP.bytes_per_page
    assert state.bytes_per_page == GROUP.bytes_per_page + 4 * 5 * 4
    assert state.leaves["partial"].shape == (7, 1, 1, 4, 5)
    assert state.leaves["conv"].shape == (7, 2, 2, 6, 3)


def test_a_cleared_page_is_zero_and_others_stay():
    state = make_state()
    state.clear([1, 4])
    for leaf in state.leaves.values():
        assert not leaf[[1, 4]].any()
        assert bool(leaf[[0, 2, 3, 5]].isnan().all())


def test_a_snapshot_is_restored_whatever_happens_to_the_working_page():
    state = make_state()
    state.clear([0, 1])
    for page in (0, 1):
        for leaf in state.leaves.values():
            leaf[page] = torch.randn(leaf.shape[1:]).to(leaf.dtype)
    kept = {name: leaf[[0, 1]].clone() for name, leaf in state.leaves.items()}
    state.snapshot([(0, 3), (1, 5)])
    for leaf in state.leaves.values():
        leaf[:2] = 9.0
    state.restore([(3, 1), (5, 0)])
    for name in ("recurrent", "conv"):
        assert torch.equal(state.leaves[name][[1, 0]], kept[name])
    assert not state.leaves["partial"][[0, 1]].any()  # at a boundary scratch is empty


def test_nothing_to_do_is_nothing_done():
    state = make_state()
    state.clear([])
    state.restore([])
    state.snapshot([])
    assert bool(state.leaves["recurrent"].isnan().all())
