import pytest

from models.state_layout import HitPolicy, StateGroup, StateKind, StateLayout
from serve.model_infer.attention_state.coordinator import StateCoordinator
from unit_tests.serve.model_infer.builders import CPU, make_layout


def test_each_group_has_its_pool():
    states = StateCoordinator(make_layout(names=("full", "draft")), 2, CPU)
    states.allocate({"full": 3, "draft": 5})
    assert {name: len(pool) for name, pool in states.pools().items()} == {"full": 3, "draft": 5}


def test_a_kind_without_a_manager_is_refused():
    layout = make_layout()
    group = StateGroup("window", StateKind.BOUNDED, HitPolicy.TRAILING_PAGES, 4, layout.groups[0].leaves, 16)
    with pytest.raises(NotImplementedError, match="'window': no manager"):
        StateCoordinator(StateLayout(4, (*layout.groups, group)), 2, CPU)
