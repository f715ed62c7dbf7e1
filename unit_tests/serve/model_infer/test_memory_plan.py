from dataclasses import replace

import pytest

from models.state_layout import HitPolicy
from serve.ipc.child import StartError
from serve.model_infer.memory_plan import MemoryRequest, PageCost, plan_memory

MIB = 1 << 20
COSTS = {"full": PageCost(64, MIB)}
REQUEST = MemoryRequest(
    max_req_total_len=2048,
    is_length_fixed=True,
    running_max_req_size=16,
    max_total_token_num=None,
    mem_fraction=0.9,
    budget_bytes=10_000 * MIB,
    is_cpu=True,
)


def test_the_default_on_the_cpu_is_modest():
    plan = plan_memory(COSTS, REQUEST)
    assert plan.num_tokens == 2 * 2049 + 16 * 256
    assert plan.num_pages == {"full": 129}
    assert plan.pool_bytes == 129 * MIB
    assert plan.summary()["limit"] == "default"


def test_the_default_on_the_cpu_has_a_ceiling():
    assert plan_memory(COSTS, replace(REQUEST, running_max_req_size=4096)).pool_bytes == 1536 * MIB


def test_two_long_requests_raise_the_ceiling_to_a_limit():
    plan = plan_memory(COSTS, replace(REQUEST, max_req_total_len=100_000, running_max_req_size=4096))
    assert plan.pool_bytes == 3126 * MIB
    plan = plan_memory(COSTS, replace(REQUEST, max_req_total_len=200_000, running_max_req_size=4096))
    assert plan.pool_bytes == 4096 * MIB


def test_the_longest_request_fits_even_above_the_ceiling():
    plan = plan_memory({"full": PageCost(64, 200 * MIB)}, replace(REQUEST, max_req_total_len=2000))
    assert plan.num_tokens == 2001
    assert plan.pool_bytes > 4 << 30


def test_little_memory_shrinks_the_default():
    plan = plan_memory(COSTS, replace(REQUEST, budget_bytes=40 * MIB))
    assert plan.num_pages == {"full": 40}
    assert plan.limit == "--mem_fraction"


def test_a_device_of_its_own_is_filled():
    plan = plan_memory(COSTS, replace(REQUEST, is_cpu=False))
    assert plan.num_pages == {"full": 10_000}


def test_the_flag_decides():
    plan = plan_memory(COSTS, replace(REQUEST, max_total_token_num=2050))
    assert plan.num_pages == {"full": 33}
    assert plan.limit == "--max_total_token_num"


def test_groups_of_other_page_lengths_cover_the_same_tokens():
    costs = {"full": PageCost(64, 64 * MIB), "sparse": PageCost(256, 16 * MIB)}
    plan = plan_memory(costs, replace(REQUEST, is_cpu=False))
    assert plan.num_pages["full"] == 4 * plan.num_pages["sparse"]
    assert plan.pool_bytes <= REQUEST.budget_bytes


def test_a_length_that_nobody_asked_for_may_shrink():
    plan = plan_memory(COSTS, replace(REQUEST, is_length_fixed=False, budget_bytes=10 * MIB))
    assert plan.num_tokens == 640
    with pytest.raises(StartError):
        plan_memory(COSTS, replace(REQUEST, is_length_fixed=False, budget_bytes=MIB // 2))


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"budget_bytes": 32 * MIB}, ["--max_req_total_len", "--mem_fraction"]),
        ({"budget_bytes": 0}, ["--max_req_total_len", "--mem_fraction"]),
        ({"max_total_token_num": 2048}, ["--max_total_token_num", "--max_req_total_len"]),
        ({"max_total_token_num": 10_000_000}, ["--max_total_token_num", "--mem_fraction"]),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_flags(changes: dict[str, int], flags: list[str]):
    with pytest.raises(StartError) as caught:
        plan_memory(COSTS, replace(REQUEST, **changes))
    assert "\n" not in str(caught.value)
    assert all(flag in str(caught.value) for flag in flags)


WINDOW = PageCost(64, 5 * MIB, HitPolicy.TRAILING_PAGES, window_tokens=511)
RECURRENT = PageCost(64, 70 * MIB, HitPolicy.EXACT_CHECKPOINT)
TAIL = PageCost(64, 1 << 14, HitPolicy.EXACT_CHECKPOINT)


def test_windows_get_what_running_requests_reach_and_as_much_again():
    request = replace(REQUEST, is_cpu=False, checkpoint_interval=1 << 20)
    plan = plan_memory({**COSTS, "window": WINDOW}, request)
    assert plan.num_requests == 16
    assert plan.num_pages["window"] == 2 * (16 * (8 + 2) + 2 * 33)
    assert plan.pool_bytes == sum(
        count * cost.bytes_per_page
        for count, cost in zip(plan.num_pages.values(), [COSTS["full"], WINDOW], strict=True)
    )
    assert 9_999 * MIB <= plan.pool_bytes <= REQUEST.budget_bytes


def test_much_memory_keeps_a_window_for_each_interval_of_cached_tokens():
    plan = plan_memory({**COSTS, "window": WINDOW}, replace(REQUEST, is_cpu=False, budget_bytes=200_000 * MIB))
    assert plan.num_pages["window"] == 16 * (8 + 2) + 2 * 33 + plan.num_tokens // 2048 * 8
    assert plan.num_pages["window"] > 0.25 * plan.num_pages["full"]


def test_windows_never_get_more_than_all_tokens_need_nor_less_than_one_request_does():
    plan = plan_memory({**COSTS, "window": WINDOW}, replace(REQUEST, max_total_token_num=2050))
    assert plan.num_pages == {"full": 33, "window": 33}
    short = replace(REQUEST, max_req_total_len=100, max_total_token_num=101)
    assert plan_memory({**COSTS, "window": WINDOW}, short).num_pages == {"full": 2, "window": 10}


def test_a_model_of_windows_alone_holds_all_tokens_in_them():
    plan = plan_memory({"window": WINDOW}, replace(REQUEST, is_cpu=False))
    assert plan.num_pages == {"window": 2000}
    assert plan.num_tokens == 2000 * 64


def test_checkpoints_are_three_a_running_request_and_a_share_for_cached_prefixes():
    plan = plan_memory({**COSTS, "recurrent": RECURRENT}, replace(REQUEST, is_cpu=False, budget_bytes=40_000 * MIB))
    assert plan.num_requests == 16
    assert plan.num_pages["recurrent"] >= 3 * 16 + 1 + 16
    assert 39_000 * MIB <= plan.pool_bytes <= 40_000 * MIB


def test_little_memory_is_for_fewer_requests_at_a_time():
    plan = plan_memory({**COSTS, "recurrent": RECURRENT}, replace(REQUEST, is_cpu=False, budget_bytes=2_000 * MIB))
    assert 1 < plan.num_requests < 16
    assert plan.num_pages["recurrent"] >= 3 * plan.num_requests + 1
    assert plan.num_pages["full"] >= 450
    assert plan.summary()["num_requests_at_a_time"] == plan.num_requests


def test_small_checkpoints_are_many():
    plan = plan_memory({**COSTS, "tail": TAIL}, replace(REQUEST, is_cpu=False))
    assert plan.num_pages["tail"] == 3 * 16 + 1 + plan.num_pages["full"]


def test_the_default_on_the_cpu_has_its_ceiling_over_all_groups():
    plan = plan_memory({**COSTS, "window": WINDOW, "recurrent": RECURRENT}, replace(REQUEST, max_req_total_len=500))
    assert plan.pool_bytes <= 1536 * MIB
    assert plan.num_tokens >= 501
