"""What the launcher says about a running engine."""

import pytest

from models.state_layout import HitPolicy
from serve.ipc.child import StartError
from serve.router.cost_model import CostPrior
from serve.router.settings import EngineFacts

INFO = {"namespace": "ab" * 32, "key": "cd" * 32, "num_pages": {"full": 40}}

WINDOW = {"name": "window", "kind": "bounded", "hit_policy": "trailing_pages", "window_tokens": 31}
STATE = {"name": "state", "kind": "bounded", "hit_policy": "exact_checkpoint"}


def test_groups_are_full_unless_a_layout_says_otherwise():
    facts = EngineFacts.from_info(INFO, 16)
    assert [(spec.name, spec.policy) for spec in facts.specs] == [("full", HitPolicy.ALL_PAGES)]
    assert facts.num_pages == {"full": 40}
    assert facts.hasher.page_size == 16
    assert facts.prior == CostPrior()


def test_a_start_up_probe_sets_the_prior():
    facts = EngineFacts.from_info({**INFO, "prior": {"prefill_tokens_per_s": 50.0, "decode_step_s": 0.5}}, 16)
    assert facts.prior == CostPrior(50.0, 0.5)


def test_a_pool_that_carries_one_request_is_enough():
    groups, num_pages = [{"name": "full"}, WINDOW, STATE], {"full": 1, "window": 4, "state": 4}
    facts = EngineFacts.from_info({**INFO, "groups": groups, "num_pages": num_pages}, 16)
    assert [spec.window_pages for spec in facts.specs] == [0, 2, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [STATE], "num_pages": {"state": 3}},
        {"groups": [WINDOW], "num_pages": {"window": 3}},
        {"groups": [{"name": "full", "kind": "full", "hit_policy": "trailing_pages"}]},
        {"groups": [{"name": "other"}]},
        {"num_pages": {"full": 0}},
    ],
)
def test_what_cannot_be_run_stops_the_start(change):
    with pytest.raises(StartError):
        EngineFacts.from_info({**INFO, **change}, 16)
