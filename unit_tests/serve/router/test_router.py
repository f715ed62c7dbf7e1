"""Whole requests through the router, with workers that check every page they read."""

import pytest

from serve.ipc.messages import ServerDown, StepResult, SubmitRequest
from serve.router.router import StepTimeoutError
from serve.types import FinishReason, RequestStatus, SamplingParams
from unit_tests.serve.router.router_fakes import EOS, EPOCH, PAGE, Harness, expected_tokens, prompt_of


def test_a_request_gets_the_models_tokens_and_ends_by_length():
    harness = Harness()
    client = harness.submit(prompt_of(50), max_tokens=20)
    harness.run()
    harness.check_tokens(client)
    assert client.finishes == [FinishReason.LENGTH]
    assert client.num_cached == 0
    harness.check_idle()


def test_nothing_is_computed_beyond_the_length_limit():
    harness = Harness()
    harness.submit(prompt_of(10), max_tokens=5)
    harness.run()
    assert len(harness.plans) == 5
    assert harness.router.statistics.num_dropped_tokens == 0
    harness.check_idle()


def test_a_stop_token_ends_a_request_and_its_spare_row_is_dropped():
    harness = Harness()
    prompt = next(p for p in (prompt_of(20, seed) for seed in range(99)) if EOS in expected_of(p))
    client = harness.submit(prompt, max_tokens=40, ignore_eos=False)
    harness.run()
    harness.check_tokens(client)
    assert client.finishes == [FinishReason.STOP]
    assert client.tokens[-1] == EOS
    assert harness.router.statistics.num_dropped_tokens == 1
    harness.check_idle()


def expected_of(prompt: list[int]) -> list[int]:
    """Tokens of a long answer that are neither its first nor its last."""
    return expected_tokens(prompt, SamplingParams(max_tokens=30, ignore_eos=True), 512)[1:-1]


def test_min_tokens_holds_a_stop_token_back():
    harness = Harness()
    prompt = next(p for p in (prompt_of(20, seed) for seed in range(99)) if EOS in expected_of(p))
    client = harness.submit(prompt, max_tokens=30, ignore_eos=False, min_tokens=30)
    harness.run()
    assert len(client.tokens) == 30


def test_two_plans_are_in_flight_and_never_more():
    harness = Harness()
    harness.submit(prompt_of(10), max_tokens=30)
    assert len(harness.plans) == 2
    for step in range(3, 20):
        harness.step_all()
        assert len(harness.plans) == step


def test_steady_decode_plans_carry_nothing():
    harness = Harness()
    harness.submit(prompt_of(17), max_tokens=30)
    harness.step_all()
    plan = harness.plans[2]
    assert not (plan.leaves)
    assert not (plan.joins)
    assert not (plan.new_pages)
    assert not (plan.chunks)
    assert not (plan.paused)


def test_no_plan_is_sent_when_there_is_nothing_to_run():
    harness = Harness()
    harness.submit(prompt_of(10), max_tokens=1)
    assert len(harness.plans) == 1
    harness.run()
    assert len(harness.plans) == 1
    harness.router.turn([])
    assert len(harness.plans) == 1
    harness.check_idle()


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows():
    harness = Harness()
    first = harness.submit(prompt_of(10), max_tokens=40)
    harness.step_all()
    second = harness.submit(prompt_of(200, 1), max_tokens=4)
    harness.run()
    chunks = [plan.chunks for plan in harness.plans if plan.chunks]
    assert len(chunks) >= 200 // 32
    assert all(count <= 32 for plan in chunks for _, count in plan)
    harness.check_tokens(first)
    harness.check_tokens(second)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_a_repeated_prompt_uses_its_pages_and_gives_the_same_tokens(length: int):
    harness = Harness()
    first = harness.submit(prompt_of(length), max_tokens=20)
    harness.run()
    again = harness.submit(prompt_of(length), max_tokens=20)
    harness.run()
    assert again.tokens == first.tokens
    assert again.num_cached == (length - 1) // PAGE * PAGE
    harness.check_idle()


def test_generated_pages_are_hit_by_the_next_turn_of_a_conversation():
    harness = Harness()
    first = harness.submit(prompt_of(20), max_tokens=40)
    harness.run()
    longer = first.prompt + first.tokens + prompt_of(5, 3)
    second = harness.submit(longer, max_tokens=3)
    harness.run()
    assert second.num_cached == (20 + 40 - 1) // PAGE * PAGE
    harness.check_tokens(second)


def test_equal_prompts_at_once_are_computed_once():
    harness = Harness(num_pages=200)
    clients = harness.submit_together([prompt_of(100)] * 8, max_tokens=4)
    harness.run()
    for client in clients:
        harness.check_tokens(client)
    shared = 100 // PAGE * PAGE
    assert harness.router.statistics.num_computed_prompt_tokens == 100 + 7 * (100 - shared)
    assert sorted(client.num_cached for client in clients) == [0] + [shared] * 7
    harness.check_idle()


def test_a_request_whose_leader_is_aborted_computes_for_itself():
    harness = Harness()
    leader, follower = harness.submit_together([prompt_of(200)] * 2, max_tokens=4)
    harness.step_all()
    harness.abort(leader)
    harness.run()
    harness.check_tokens(follower)
    assert 0 < follower.num_cached < 192
    harness.check_idle()


def test_a_held_request_waits_no_longer_than_recomputing_would_take():
    harness = Harness()
    _, follower = harness.submit_together([prompt_of(400)] * 2, max_tokens=4)
    request = harness.router.requests[follower.slot]
    assert request.status is RequestStatus.QUEUED
    deadline = harness.router.engine.planner.hold_deadline
    assert deadline == pytest.approx(harness.clock.now + 2 * 400 / 1000 + 2 * 0.01, abs=0.1)
    harness.clock.advance(10.0)
    harness.step_all()
    assert request.status is RequestStatus.PREFILLING
    harness.run()
    harness.check_tokens(follower)
    harness.check_idle()


def test_prompt_logprobs_compute_all_but_leave_their_pages():
    harness = Harness()
    harness.submit(prompt_of(40), max_tokens=2)
    harness.run()
    client = harness.submit(prompt_of(40), max_tokens=2, prompt_logprobs=1)
    harness.run()
    assert client.num_cached == 0
    other = harness.submit(prompt_of(64, 5), max_tokens=2, prompt_logprobs=1)
    harness.run()
    later = harness.submit(prompt_of(64, 5), max_tokens=2)
    harness.run()
    assert later.num_cached == 48
    assert later.tokens == other.tokens
    harness.check_idle()


def test_the_youngest_is_preempted_and_goes_on_from_its_pages():
    harness = Harness(num_pages=12)
    clients = harness.submit_together([prompt_of(20, 1), prompt_of(20, 2), prompt_of(20, 3)], max_tokens=100)
    harness.run()
    assert harness.router.statistics.num_preemptions > 0
    for client in clients:
        harness.check_tokens(client)
    assert harness.router.statistics.num_preemptions <= 4
    harness.check_idle()


def test_the_oldest_is_never_preempted():
    harness = Harness(num_pages=12)
    oldest = harness.submit(prompt_of(20, 1), max_tokens=150)
    for seed in range(2, 6):
        harness.submit(prompt_of(20, seed), max_tokens=60)
    request = harness.router.requests[oldest.slot]
    harness.run()
    assert request.num_preemptions == 0
    harness.check_idle()


def test_the_longest_request_that_fits_the_pool_ends():
    harness = Harness(num_pages=8)
    client = harness.submit(prompt_of(100), max_tokens=500)
    harness.run()
    assert len(client.tokens) == 8 * PAGE - 100
    assert client.finishes == [FinishReason.LENGTH]
    harness.check_idle()


def test_a_prompt_that_cannot_fit_is_refused_with_400():
    harness = Harness(num_pages=4)
    client = harness.submit(prompt_of(64))
    assert client.finishes == [FinishReason.ERROR]
    assert client.last.error_code == 400
    assert client.last.error
    harness.check_idle()


def test_a_full_queue_refuses_with_429():
    harness = Harness(max_queue_size=2, max_rows=1)
    clients = [harness.submit(prompt_of(10, seed)) for seed in range(5)]
    refused = [client for client in clients if client.finishes]
    assert len(refused) == 2
    assert all(client.last.error_code == 429 for client in refused)
    harness.run()
    harness.check_idle()


def test_a_request_that_takes_too_long_ends_with_504():
    harness = Harness(request_timeout_s=5.0)
    client = harness.submit(prompt_of(10), max_tokens=400)
    harness.step_all()
    assert harness.router.next_deadline() == pytest.approx(105.0)
    harness.clock.advance(5.0)
    harness.router.turn([])
    assert client.finishes == [FinishReason.ERROR]
    assert client.last.error_code == 504
    harness.run()
    harness.check_idle()


def test_a_plan_without_a_result_stops_the_router():
    harness = Harness(step_timeout_s=30.0)
    harness.submit(prompt_of(10))
    harness.clock.advance(29.0)
    harness.router.turn([])
    harness.clock.advance(1.0)
    with pytest.raises(StepTimeoutError):
        harness.router.turn([])


def test_a_stop_string_keeps_only_the_pages_of_accepted_tokens():
    harness = Harness()
    client = harness.submit(prompt_of(20), max_tokens=100)
    for _ in range(60):
        harness.step_all()
    harness.finish(client, 20)
    harness.run()
    assert client.finishes == [FinishReason.STOP]
    assert harness.ledger.groups["full"].num_cached == 40 // PAGE
    harness.check_idle()


def test_a_failed_row_ends_alone_and_leaves_no_page():
    harness = Harness()
    bad, good = harness.submit_together([prompt_of(40, 1), prompt_of(40, 2)], max_tokens=10)
    for _ in range(4):
        harness.step_all()
    result = harness.workers[0].run_next()
    row = harness.router.requests[bad.slot].row
    place = result.rows.index(row)
    del result.rows[place], result.token_ids[place]
    result.failed_rows = {row: "logits are not finite"}
    harness.router.turn([result])
    assert bad.finishes == [FinishReason.ERROR]
    assert bad.last.error == "logits are not finite"
    harness.run()
    harness.check_tokens(good)
    again = harness.submit(prompt_of(40, 1), max_tokens=1)
    harness.run()
    assert again.num_cached == 0
    harness.check_idle()


def test_a_row_that_gets_no_token_at_its_end_fails():
    harness = Harness()
    client = harness.submit(prompt_of(10), max_tokens=1)
    harness.router.turn([StepResult(EPOCH, 0, 0, 0.01)])
    assert client.finishes == [FinishReason.ERROR]
    harness.check_idle()


def test_a_plan_has_ended_when_all_ranks_answered():
    harness = Harness(num_ranks=2)
    client = harness.submit(prompt_of(10), max_tokens=3)
    harness.step(0)
    assert not client.tokens
    harness.step(0)
    harness.step(1)
    assert len(client.tokens) == 1
    harness.run()
    harness.check_tokens(client)
    harness.check_idle()


def test_results_of_another_epoch_or_repeated_ones_change_nothing():
    harness = Harness(num_ranks=2)
    client = harness.submit(prompt_of(10), max_tokens=3)
    result = harness.workers[0].run_next()
    harness.router.turn([StepResult(EPOCH - 1, 0, 1, 0.01), result, result, StepResult(EPOCH, 99, 1, 0.01)])
    assert not client.tokens
    harness.router.turn([harness.workers[1].run_next(), result])
    assert len(client.tokens) == 1
    harness.run()
    harness.check_idle()


def test_stale_repeated_and_unknown_messages_are_dropped():
    harness = Harness()
    client = harness.submit(prompt_of(10))
    harness.router.turn([SubmitRequest(client.slot, client.generation, 0, "again")])
    harness.router.turn([SubmitRequest(client.slot, client.generation + 1, 0, "stale")])
    unknown = harness.fill(prompt_of(3))
    harness.abort(unknown)
    del harness.clients[unknown.slot, unknown.generation]
    harness.run()
    harness.check_tokens(client)
    harness.abort(client)
    harness.check_idle()


def test_a_dead_server_takes_its_requests_with_it():
    harness = Harness()
    gone = harness.submit(prompt_of(10, 1), server=1, max_tokens=50)
    stays = harness.submit(prompt_of(10, 2), server=0, max_tokens=50)
    harness.step_all()
    harness.router.turn([ServerDown(1)])
    harness.run()
    assert gone.is_released
    assert not gone.finishes
    harness.check_tokens(stays)
    assert not harness.router.requests


def test_priority_order_when_asked_for():
    harness = Harness(max_rows=1, by_priority=True)
    harness.submit(prompt_of(10, 1), max_tokens=5)
    late = harness.submit(prompt_of(10, 2), priority=5, max_tokens=5)
    soon = harness.submit(prompt_of(10, 3), priority=-1, max_tokens=5)
    while not soon.finishes:
        assert not late.tokens
        harness.step_all()
    harness.run()
    harness.check_idle()


def test_requests_that_came_before_the_engine_are_served():
    harness = Harness()
    harness.router = harness._make_router()
    client = harness.submit(prompt_of(10))
    dropped = harness.submit(prompt_of(10))
    harness.abort(dropped)
    assert not harness.plans
    harness.engine_up()
    harness.run()
    harness.check_tokens(client)
    assert dropped.is_released
    assert not dropped.outputs


def test_a_pool_of_two_groups_moves_together():
    harness = Harness(groups=("full", "draft"), num_pages=12)
    clients = harness.submit_together([prompt_of(20, seed) for seed in range(3)], max_tokens=100)
    harness.run()
    for client in clients:
        harness.check_tokens(client)
    harness.check_idle()
