import pytest

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, StateLayout
from serve.ipc.messages import JoinRow
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.errors import PlanError
from unit_tests.serve.model_infer.builders import CPU, make_layout


def make_states() -> StateCoordinator:
    """Groups full, window, recurrent and tail with 8 pages each."""
    layout = make_layout()
    window = StateGroup("window", StateKind.BOUNDED, HitPolicy.TRAILING_PAGES, 4, layout.groups[0].leaves, 7)
    leaf = Leaf("state", (0,), (3,), "float32", ShardKind.REPLICATED, 1)
    recurrent = StateGroup("recurrent", StateKind.BOUNDED, HitPolicy.EXACT_CHECKPOINT, 4, (leaf,))
    tail = StateGroup("tail", StateKind.TAIL, HitPolicy.EXACT_CHECKPOINT, 4, (leaf,))
    states = StateCoordinator(StateLayout(4, (*layout.groups, window, recurrent, tail)), 1, 0, CPU)
    states.allocate(dict.fromkeys(states.states, 8))
    return states


def join(num_cached: int, working: int, **restores: int) -> JoinRow:
    pages = {"full": [0, 1], "window": [1], "recurrent": [working], "tail": [working]}
    return JoinRow(0, 0, 1, 9, 9, num_cached, pages, {"window": 1}, restores)


def test_each_group_has_its_pool():
    states = StateCoordinator(make_layout(names=("full", "draft")), 1, 0, CPU)
    states.allocate({"full": 3, "draft": 5})
    assert {name: len(pool) for name, pool in states.pools().items()} == {"full": 3, "draft": 5}


def test_a_new_row_begins_with_nothing_or_with_its_checkpoint():
    states = make_states()
    leaves = states.leaves()
    for name in ("recurrent", "tail"):
        leaves[name]["state"][:] = 5.0
        leaves[name]["state"][6] = 7.0
    states.begin([join(0, 2), join(8, 3, recurrent=6, tail=6)])
    for name in ("recurrent", "tail"):
        assert leaves[name]["state"][:, 0, 0, 0].tolist() == [5, 5, 0, 7, 5, 5, 7, 5, 5]


def test_a_snapshot_of_one_group_leaves_the_other():
    states = make_states()
    leaves = states.leaves()
    leaves["recurrent"]["state"][2] = leaves["tail"]["state"][2] = 3.0
    states.snapshot([("recurrent", 2, 7)])
    assert leaves["recurrent"]["state"][7, 0, 0, 0] == 3.0
    assert leaves["tail"]["state"][7, 0, 0, 0] == 0.0


def test_plans_that_cannot_be_right_are_refused():
    states = make_states()
    with pytest.raises(PlanError, match="8 cached tokens without a state of group 'tail'"):
        states.begin([join(8, 3, recurrent=6)])
    with pytest.raises(PlanError, match=r"page 8 of group 'recurrent' is not in \[0, 8\)"):
        states.begin([join(8, 3, recurrent=8, tail=1)])
    with pytest.raises(PlanError, match="'window' has no checkpoints"):
        states.snapshot([("window", 1, 2)])
    with pytest.raises(PlanError, match="page -1"):
        states.snapshot([("tail", 1, -1)])
