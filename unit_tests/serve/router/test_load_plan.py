"""The longest prefix over all tiers, and what of it has to come."""

from serve.router.found import Found
from serve.router.ledger import StateLedger
from serve.router.load_plan import LoadPlan, PlanMaker
from serve.router.prefix_index import GroupSpec
from unit_tests.serve.router.test_ledger import PAGE, names_of, store


def make(*groups: str, **page_bytes: int) -> tuple[StateLedger, PlanMaker]:
    groups = groups or ("full",)
    ledger = StateLedger([GroupSpec(group) for group in groups], dict.fromkeys(groups, 16), PAGE)
    return ledger, PlanMaker(ledger, {**dict.fromkeys(groups, 100), **page_bytes})


def test_device_first_then_host_then_nothing():
    ledger, plans = make()
    store(ledger, "ab")
    plan = plans.plan(names_of("abcdef"), 6 * PAGE + 1, Found({"full": 0b1100}, {}))
    assert plan == LoadPlan(4, 2, {"full": [2, 3]})
    assert (plan.num_gained, plan.first_missing, plans.bytes_of(plan)) == (2, 2, 200)


def test_host_and_disk_count_together_and_only_disk_pages_are_promoted():
    _ledger, plans = make()
    found = Found({"full": 0b0101}, {"full": 0b0110})
    plan = plans.plan(names_of("abcd"), 4 * PAGE + 1, found)
    assert plan == LoadPlan(3, 0, {"full": [0, 1, 2]})
    assert plans.disk_bytes(plan, found) == 100


def test_the_last_token_is_always_computed():
    _, plans = make()
    plan = plans.plan(names_of("abcd"), 4 * PAGE, Found({"full": 0b1111}, {}))
    assert plan.num_pages == 3


def test_there_is_no_plan_when_the_device_has_as_much():
    ledger, plans = make()
    store(ledger, "abcd")
    assert plans.plan(names_of("abcd"), 4 * PAGE + 1, Found({"full": 0b1111}, {})) is None
    assert plans.plan(names_of("xyz"), 3 * PAGE + 1, Found({"full": 0b0110}, {})) is None


def test_every_group_must_have_a_page():
    _ledger, plans = make("full", "index")
    plan = plans.plan(names_of("abcd"), 4 * PAGE + 1, Found({"full": 0b1111, "index": 0b0011}, {}))
    assert plan.num_pages == 2


def test_groups_without_bytes_need_no_transfer():
    _ledger, plans = make("full", "empty", empty=0)
    plan = plans.plan(names_of("abcd"), 4 * PAGE + 1, Found({"full": 0b0011}, {}))
    assert plan == LoadPlan(2, 0, {"full": [0, 1], "empty": [0, 1]})
    assert plans.bytes_of(plan) == 200


def test_a_cut_plan_loads_no_more_than_it_may_and_keeps_device_pages():
    ledger, plans = make()
    held = store(ledger, "abcdefgh").pages["full"]
    for place in (1, 2, 5, 6):
        ledger.forget("full", held[place])
    names, found = names_of("abcdefgh"), Found({"full": 0b01100110}, {})
    plan = plans.plan(names, 8 * PAGE + 1, found)
    assert plan == LoadPlan(8, 1, {"full": [1, 2, 5, 6]})
    assert plans.cut(plan, names, found, {"full": 9}) == plan
    assert plans.cut(plan, names, found, {"full": 2}) == LoadPlan(5, 1, {"full": [1, 2]})
    assert plans.cut(plan, names, found, {"full": 0}) is None
    assert plans.cut(plan, names, found, {"full": -1}) is None
