from dataclasses import replace

import pytest

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
