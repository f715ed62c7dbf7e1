"""Whole requests of models with windows and recurrent states: every state that a token reads is the right one."""

import pytest

from serve.types import FinishReason
from unit_tests.serve.router.router_fakes import PAGE, Client, Harness, prompt_of

HYBRIDS = [
    ("full", "window"),
    ("full", "state"),
    ("full", "rest"),
    ("full", "window", "state", "tail"),
    ("window",),
    ("state",),
]
STATEFUL = [groups for groups in HYBRIDS if "state" in groups]


def serve(harness: Harness, prompt: list[int], **sampling) -> Client:
    client = harness.submit(prompt, **sampling)
    harness.run()
    harness.check_tokens(client)
    return client


def snapshots(harness: Harness) -> list[int]:
    """Tokens computed where each plan keeps states."""
    found = []
    for plan in harness.plans:
        found += sorted({row for row, _, _ in plan.snapshots})
    return found


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_same_prompt_hits_all_that_it_may(groups: tuple[str, ...], length: int, num_ranks: int):
    harness = Harness(groups=groups, num_ranks=num_ranks)
    first = serve(harness, prompt_of(length), max_tokens=40)
    again = serve(harness, prompt_of(length), max_tokens=40)
    assert (first.num_cached, again.num_cached) == (0, (length - 1) // PAGE * PAGE)
    assert again.tokens == first.tokens
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
def test_the_next_turn_hits_at_the_last_boundary_of_the_answer(groups: tuple[str, ...]):
    harness = Harness(groups=groups)
    turn = serve(harness, prompt_of(45), max_tokens=50)
    turn = serve(harness, turn.prompt + turn.tokens + prompt_of(9, 2), max_tokens=50)
    assert turn.num_cached == 94 // PAGE * PAGE  # the last of 95 tokens was not computed
    turn = serve(harness, turn.prompt + turn.tokens + prompt_of(9, 3), max_tokens=5)
    assert turn.num_cached == 153 // PAGE * PAGE
    harness.check_idle()


@pytest.mark.parametrize("groups", STATEFUL)
def test_prompts_that_part_meet_at_a_checkpoint_of_the_place_where_they_part(groups: tuple[str, ...]):
    shared = prompt_of(5 * PAGE + 3)
    harness = Harness(groups=groups)
    serve(harness, shared + prompt_of(40, 1), max_tokens=1)
    second = serve(harness, shared + prompt_of(40, 2), max_tokens=1)
    third = serve(harness, shared + prompt_of(40, 3), max_tokens=1)
    if "full" in groups:
        assert (second.num_cached, third.num_cached) == (0, 5 * PAGE)
    else:  # without pages nobody knows that another has been there
        assert (second.num_cached, third.num_cached) == (0, 0)
    harness.check_idle()


def test_a_prompt_keeps_its_state_at_intervals():
    harness = Harness(groups=("full", "state"), checkpoint_interval=40)
    serve(harness, prompt_of(200), max_tokens=1)
    assert harness.router.statistics.num_snapshots == 4  # 48, 96, 144 and 192, which is its last boundary too
    for length, cached in ((60, 48), (100, 96), (190, 144)):
        assert serve(harness, prompt_of(length) + [1] * 10, max_tokens=1).num_cached == cached


def test_chunks_end_where_a_state_is_kept_and_rows_are_otherwise_as_full_as_before():
    harness = Harness(groups=("full", "state"), chunked_prefill_size=64)
    serve(harness, prompt_of(100), max_tokens=1)
    assert [plan.chunks for plan in harness.plans] == [[(0, 64)], [(0, 32)], [(0, 4)]]
    assert [bool(plan.snapshots) for plan in harness.plans] == [False, True, False]


def test_a_join_names_one_page_of_a_state_and_what_it_begins_with():
    harness = Harness(groups=("full", "window", "state"))
    serve(harness, prompt_of(100), max_tokens=1)
    first = harness.plans[0].joins[0]
    assert (first.restores, first.first_places) == ({}, {"window": 0})
    assert (len(first.pages["full"]), len(first.pages["state"])) == (7, 1)
    harness.plans.clear()
    serve(harness, prompt_of(100), max_tokens=1)
    join = harness.plans[0].joins[0]
    assert (join.num_cached, join.first_places, set(join.restores)) == (96, {"window": 4}, {"state"})
    assert (len(join.pages["window"]), len(join.pages["state"])) == (3, 1)
    assert join.restores["state"] != join.pages["state"][0]


def test_a_steady_decode_step_says_nothing_but_at_page_ends():
    harness = Harness(groups=("full", "window", "state"))
    serve(harness, prompt_of(20), max_tokens=60)
    busy = [plan for plan in harness.plans if plan.new_pages or plan.snapshots or plan.joins or plan.chunks]
    assert len(busy) <= 3 + 2 * (80 // PAGE)


def test_equal_prompts_compute_once():
    harness = Harness(groups=("full", "window", "state"))
    clients = harness.submit_together([prompt_of(100)] * 3, max_tokens=5)
    harness.run()
    assert sorted(client.num_cached for client in clients) == [0, 96, 96]
    for client in clients:
        harness.check_tokens(client)
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
def test_a_long_prompt_holds_no_more_of_a_window_than_it_sees(groups: tuple[str, ...]):
    harness = Harness(groups=groups, pool_sizes={"window": 9, "state": 4, "tail": 4})
    client = harness.submit(prompt_of(400), max_tokens=60)
    while harness.is_busy:
        harness.step_all()
        harness.check()
    harness.check_tokens(client)
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
def test_pools_that_carry_one_request_carry_many_one_after_the_other(groups: tuple[str, ...]):
    harness = Harness(groups=groups, num_pages=8, pool_sizes={"window": 4, "state": 4, "tail": 4})
    clients = harness.submit_together([prompt_of(100 - seed, seed) for seed in range(4)], max_tokens=28)
    clients += harness.submit_together([prompt_of(100)] * 2, max_tokens=28)
    harness.run()
    for client in clients:
        harness.check_tokens(client)
    harness.check_idle()


@pytest.mark.parametrize("groups", [groups for groups in STATEFUL if "full" in groups])
def test_a_preempted_request_goes_on_from_its_newest_state(groups: tuple[str, ...]):
    harness = Harness(num_pages=12, groups=groups)
    harness.router.engine.admission.estimate.fraction = 0.05
    oldest = harness.submit(prompt_of(36, 1), max_tokens=70)
    client = harness.submit(prompt_of(20, 2), max_tokens=70)
    request = harness.router.requests[client.slot]
    harness.run()
    for each in (oldest, client):
        harness.check_tokens(each)
    assert request.num_preemptions == 1
    again = [join for plan in harness.plans for join in plan.joins][-1]
    assert (again.slot, again.num_cached) == (client.slot, 5 * PAGE)
    assert again.num_known - again.num_cached < PAGE
    harness.check_idle()


def test_a_request_that_is_preempted_in_its_prompt_goes_on_from_a_state_of_it():
    harness = Harness(num_pages=18, groups=("full", "state"), checkpoint_interval=2 * PAGE, batch_max_tokens=PAGE + 1)
    harness.router.engine.admission.estimate.fraction = 0.05
    oldest = harness.submit(prompt_of(20, 1), max_tokens=125)
    while len(oldest.tokens) < 102:
        harness.step_all()
    client = harness.submit(prompt_of(150, 2), max_tokens=4)
    request = harness.router.requests[client.slot]
    harness.run()
    assert request.num_preemptions == 1
    first, again = [join for plan in harness.plans for join in plan.joins if join.slot == client.slot]
    assert (first.num_cached, first.num_known, again.num_cached, again.num_known) == (0, 150, 4 * PAGE, 150)
    for each in (oldest, client):
        harness.check_tokens(each)
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6, 12, 25])
def test_an_abort_leaves_no_page_behind(groups: tuple[str, ...], num_steps: int):
    harness = Harness(groups=groups)
    client = harness.submit(prompt_of(100), max_tokens=60)
    for _ in range(num_steps):
        harness.step_all()
    harness.abort(client)
    harness.run()
    assert client.finishes == [FinishReason.ABORT]
    harness.check_idle()
    serve(harness, prompt_of(100), max_tokens=60)


@pytest.mark.parametrize("groups", HYBRIDS)
def test_a_hit_needs_every_group(groups: tuple[str, ...]):
    for lost in groups:
        harness = Harness(groups=groups)
        serve(harness, prompt_of(100), max_tokens=1)
        harness.ledger.groups[lost].flush()
        harness.ledger.index_version += 1
        assert serve(harness, prompt_of(100), max_tokens=30).num_cached == 0
        assert serve(harness, prompt_of(100), max_tokens=30).num_cached == 96
        harness.check_idle()


def test_what_a_failed_row_has_kept_is_forgotten():
    harness = Harness(groups=("full", "window", "state"))
    client = harness.submit(prompt_of(100), max_tokens=20)
    while not client.tokens:
        harness.step_all()
    result = harness.workers[0].run_next()
    row = harness.router.requests[client.slot].row
    del result.rows[result.rows.index(row)], result.token_ids[0]
    result.failed_rows = {row: "logits are not finite"}
    harness.router.turn([result])
    harness.run()
    assert all(len(group.index) == 0 for group in harness.ledger.groups.values())
    harness.check_idle()


def test_a_stop_string_keeps_no_state_beyond_what_was_accepted():
    harness = Harness(groups=("full", "state"))
    client = harness.submit(prompt_of(40), max_tokens=100)
    while len(client.tokens) < 60:
        harness.step_all()
    harness.finish(client, 10)
    harness.run()
    assert len(harness.ledger.groups["full"].index) == 50 // PAGE
    assert len(harness.ledger.groups["state"].index) == 1
    assert serve(harness, client.prompt + client.tokens[:10] + [1], max_tokens=1).num_cached == 2 * PAGE
    harness.check_idle()


def test_checkpoints_that_find_no_page_are_skipped_and_counted():
    harness = Harness(groups=("full", "state"), pool_sizes={"state": 7}, checkpoint_interval=PAGE, max_rows=2)
    clients = harness.submit_together([prompt_of(150, 1), prompt_of(150, 2)], max_tokens=4)
    harness.run()
    for client in clients:
        harness.check_tokens(client)
    assert harness.router.statistics.num_snapshots_skipped > 0
    harness.check_idle()


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("num_steps", [1, 3, 12, 30])
def test_nothing_of_a_request_that_ran_through_a_flush_is_hit(groups: tuple[str, ...], num_steps: int):
    harness = Harness(groups=groups)
    client = harness.submit(prompt_of(100), max_tokens=60)
    for _ in range(num_steps):
        harness.step_all()
    harness.router.flush()
    harness.run()
    harness.check_tokens(client)
    assert serve(harness, client.prompt + client.tokens, max_tokens=5).num_cached == 0
    assert serve(harness, client.prompt + client.tokens, max_tokens=5).num_cached == 9 * PAGE
    harness.check_idle()
