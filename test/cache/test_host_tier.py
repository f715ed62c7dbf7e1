"""The host tier through the whole engine, in float32: a hit gives the tokens of transformers, which has no cache."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tiny_engine import (
    BOUNDARY_LENGTHS,
    NUM_TOKENS,
    PAGE,
    Answer,
    CacheServer,
    Load,
    Tokens,
    make_prompt,
    make_trees,
    usable,
)

POOL_TOKENS = 3072
CHUNK = 256
ATTEMPTS = 4


@pytest.fixture(scope="module")
def served(start_tiers: Callable[..., Any]) -> Iterator[CacheServer]:
    with start_tiers("--max_total_token_num", str(POOL_TOKENS), "--chunked_prefill_size", str(CHUNK)) as server:
        yield server


@pytest.fixture(scope="module")
def served_tp_2(start_tiers: Callable[..., Any]) -> Iterator[CacheServer]:
    """Two ranks whose faults a test can change; answers are stored too."""
    faults = "host.copy_out:delay=0:n=1"
    with start_tiers("--tp", "2", "--cpu_cache_store_output", "--fault_inject", faults) as server:
        yield server


def host_hits(server: CacheServer, prompts: list[Tokens], **options: Any) -> list[Answer]:
    """The best answer of each after flushes of the device: a busy machine may make one load not pay, but not always."""
    best: dict[int, Answer] = {}
    for _ in range(ATTEMPTS):
        left = [index for index, prompt in enumerate(prompts) if best.get(index, _NOTHING).host < usable(prompt)]
        if not left:
            break
        server.flush_device()
        for index, answer in zip(left, server.check_all([prompts[i] for i in left], **options), strict=True):
            best[index] = max(answer, best.get(index, _NOTHING), key=lambda each: each.host)
    return [best.get(index, _NOTHING) for index in range(len(prompts))]


_NOTHING = Answer([], 0, 0, 0)


def test_hits_at_page_boundaries(served: CacheServer):
    prompts = [make_prompt(length, ("boundary", length)) for length in BOUNDARY_LENGTHS]
    assert all(answer.cached == 0 for answer in served.check_all(prompts))
    assert [answer.host for answer in host_hits(served, prompts)] == [usable(prompt) for prompt in prompts]
    served.check_clean()


def test_hits_after_other_prompts_took_the_device(served: CacheServer):
    prompts = [make_prompt(PAGE * 8 + rest, ("evicted", rest)) for rest in (-1, 0, 1)]
    served.check_all(prompts)
    served.settle()
    for number in range(3):
        served.check(make_prompt(1500, ("filler", number)), 1)
    answers = served.check_all(prompts)
    assert all(answer.device == 0 for answer in answers)
    assert sum(answer.host for answer in answers) >= usable(prompts[0])
    served.check_clean()


def test_hits_of_many_at_once(served: CacheServer):
    prompts = make_trees(4, 6, "many")
    served.check_all(prompts, 16)
    served.flush_device()
    answers = served.check_all(prompts, 16)
    assert sum(answer.cached for answer in answers) > 0.5 * sum(map(usable, prompts))
    assert any(answer.host for answer in answers)
    served.check_clean()


def converse(server: CacheServer, seed: str) -> tuple[Tokens, int, int, Answer]:
    """Three turns, a flush of the device, a fourth; its prompt, the ends of the third turn's prompt and answer."""
    history: Tokens = []
    for turn in range(3):
        history += make_prompt(40, (seed, turn))
        end_of_prompt = len(history)
        history += server.check(history, 24).tokens
    server.flush_device()
    prompt = history + make_prompt(40, (seed, 3))
    return prompt, end_of_prompt, len(history), server.check(prompt, 24)


def test_a_fourth_turn_finds_the_prompts_of_the_first_three(served: CacheServer):
    """Earlier answers are part of later prompts, so that only the last answer is missing."""
    found = [converse(served, f"conversation {attempt}") for attempt in range(ATTEMPTS)]
    assert all(answer.cached <= end // PAGE * PAGE for _, end, _, answer in found)
    assert any(answer.host == end // PAGE * PAGE for _, end, _, answer in found), found


def test_tp_2_of_which_one_rank_fails_to_store_at_random(served_tp_2: CacheServer):
    prompts = [make_prompt(length, ("failing", length)) for length in BOUNDARY_LENGTHS]
    served_tp_2.call("worker-1", "inject", faults="host.copy_out:fail:p=0.2")
    served_tp_2.check_all(prompts, 4)
    served_tp_2.flush_device()
    answers = served_tp_2.check_all(prompts)
    assert 0 < sum(answer.host for answer in answers) < sum(map(usable, prompts))
    failed = {rank: served_tp_2.call(rank, "status")["jobs"].get("failed", 0) for rank in ("worker-0", "worker-1")}
    assert failed["worker-0"] == 0 < failed["worker-1"]
    served_tp_2.call("worker-1", "inject", faults="")
    for _ in range(ATTEMPTS):  # what failed is tried again when it is computed again
        served_tp_2.flush_device()
        served_tp_2.check_all(prompts, 8)
    assert [answer.host for answer in host_hits(served_tp_2, prompts)] == [usable(prompt) for prompt in prompts]
    served_tp_2.check_clean()


def test_a_fourth_turn_finds_answers_too_where_they_are_stored(start_tiers: Callable[..., Any]):
    with start_tiers("--cpu_cache_store_output") as server:
        found = [converse(server, f"stored output {attempt}") for attempt in range(ATTEMPTS)]
    # The last token of an answer is never computed, so that it is in no page.
    assert any(answer.host == (end - 1) // PAGE * PAGE for _, _, end, answer in found), [each[1:] for each in found]


def test_a_killed_engine_finds_the_first_chunks_of_a_long_prompt(served: CacheServer):
    prompt = make_prompt(8 * CHUNK + 5, "killed")
    expected = served.model.text(prompt)
    published = served.settle()["pages_published"]
    worker = served.server.child("worker")
    thread = threading.Thread(target=lambda: _ignore_errors(served, prompt))
    thread.start()
    deadline = time.monotonic() + 30
    while served.cache_statistics()["pages_published"] < published + 3 * CHUNK // PAGE:
        assert time.monotonic() < deadline, "the first chunks were not stored in time"
        assert thread.is_alive(), "the first chunks were not stored while it ran"
    worker.kill()
    thread.join()
    served.server.wait_until_ready()
    answer = served.ask(prompt)
    assert answer.tokens == expected
    assert answer.device == 0
    assert 3 * CHUNK <= answer.host < 8 * CHUNK
    served.check_clean()


def _ignore_errors(server: CacheServer, prompt: Tokens) -> None:
    with contextlib.suppress(httpx.HTTPError):
        server.ask(prompt)


@pytest.mark.parametrize("role", ["cache", "router", "worker"])
def test_a_kill_under_load_leaves_nothing_wrong(served: CacheServer, role: str):
    prompts = make_trees(6, 6, "kills")
    with Load(served, prompts) as load:
        time.sleep(random.uniform(0.5, 1.5))
        served.server.child(role).kill()
        time.sleep(0.3)
        served.server.wait_until_ready()
        time.sleep(1.0)
    assert load.wrong == []
    assert load.num_right > 0
    served.check_clean()
    assert served.check(prompts[0]).tokens == served.model.text(prompts[0], NUM_TOKENS)
