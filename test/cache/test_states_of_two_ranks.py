"""Families with states of several kinds, in float32: what two ranks have written one rank reads, turn follows on turn,
prompts that part are hit where they do, and requests that are preempted or left give all that they hold back."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from state_models import StateModel
from tiny_engine import PAGE, CacheServer, Tokens, make_prompt, usable

Start = Callable[..., contextlib.AbstractContextManager[CacheServer]]
LENGTHS = [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 9 * PAGE + 1, 280]
RECURRENT = ["qwen3_next", "deepseek_v4"]
FAMILIES = ["gemma3", "deepseek_v3", *RECURRENT]
FURTHER = ["gpt_oss", "mistral", "lfm2", "deepseek_v2", "qwen3_5"]
ATTEMPTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StateModel]:
    """A case's checkpoint, made once."""
    made: dict[str, StateModel] = {}

    def get(case: str) -> StateModel:
        if case not in made:
            made[case] = StateModel(tmp_path_factory.mktemp(case), case)
        return made[case]

    return get


@pytest.fixture
def start_states(start_server: Callable[..., Any]) -> Start:
    """`with start_states(model, "--tp", "2", disk=directory) as server`: a host tier, and a disk tier if asked for."""

    @contextlib.contextmanager
    def start(model: StateModel, *flags: str, disk: Path | None = None) -> Iterator[CacheServer]:
        tiers = ["--enable_cpu_cache", "--cpu_cache_load_policy", "always", "--cpu_cache_storage_size", "0.1"]
        if disk is not None:
            tiers += ["--enable_disk_cache", "--disk_cache_dir", str(disk), "--disk_cache_storage_size", "0.2"]
        common = ("--data_type", "float32", "--cpu_cache_token_page_size", str(PAGE))
        with start_server(*common, *tiers, *flags, model=str(model.path)) as server:
            yield CacheServer(server, model)

    return start


def best_hits(server: CacheServer, prompts: list[Tokens], tier: str) -> list[int]:
    """Tokens of each that came from host or disk after flushes of the device; a busy machine may make one load late."""
    best = [0] * len(prompts)
    for _ in range(ATTEMPTS):
        server.flush_device()
        for index, prompt in enumerate(prompts):
            if best[index] < usable(prompt):
                answer = server.check(prompt)
                best[index] = max(best[index], answer.host + (answer.disk if tier == "disk" else 0))
        if best == [usable(prompt) for prompt in prompts]:
            break
    return best


@pytest.mark.parametrize("case", [*FAMILIES, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER)])
def test_hits_of_every_tier_give_the_text_of_misses(
    case: str, model: Callable[[str], StateModel], start_states: Start, tmp_path: Path
):
    """Two ranks write, with hits on device and host; one rank reads from disk after a restart."""
    prompts = [make_prompt(length, (case, length)) for length in LENGTHS]
    expected = [usable(prompt) for prompt in prompts]
    disk = tmp_path / "pages"
    with start_states(model(case), "--tp", "2", disk=disk) as server:
        assert [answer.cached for answer in server.check_all(prompts)] == [0] * len(prompts)
        assert [answer.device for answer in server.check_all(prompts)] == expected
        assert best_hits(server, prompts, "host") == expected
        server.settle()
        server.check_clean()
    with start_states(model(case), disk=disk) as server:
        assert [answer.cached for answer in server.check_all([make_prompt(99, "control")])] == [0]
        assert best_hits(server, prompts, "disk") == expected
        server.check_clean()


@pytest.mark.parametrize("case", RECURRENT)
def test_a_second_turn_begins_where_the_first_answer_ended(
    case: str, model: Callable[[str], StateModel], start_states: Start
):
    with start_states(model(case)) as server:
        turn = make_prompt(50, (case, "turn"))
        for _ in range(3):
            answer = server.check(turn, 37)
            known = len(turn) + 37 - 1  # the last token of an answer is never computed
            turn = [*turn, *answer.tokens, *make_prompt(11, (case, len(turn)))]
            second = server.check(turn, 5)
            assert second.device == known // PAGE * PAGE, len(turn)
        server.check_clean()


@pytest.mark.parametrize("case", RECURRENT)
def test_a_branch_is_hit_where_prompts_part(case: str, model: Callable[[str], StateModel], start_states: Start):
    """The second prompt leaves the first within it: its state there is kept for the third."""
    stem = make_prompt(6 * PAGE, (case, "stem"))
    prompts = [[*stem, *make_prompt(3 * PAGE, (case, "branch", number))] for number in range(3)]
    with start_states(model(case)) as server:
        assert server.check(prompts[0]).device == 0
        server.check(prompts[1])
        assert server.check(prompts[2]).device == 6 * PAGE
        server.check_clean()


def leave_after(server: CacheServer, prompt: Tokens, num_lines: int) -> None:
    """A client that goes in the middle of its answer."""
    body = {"model": server.server.model, "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with server.server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for _ in zip(range(num_lines), response.iter_lines(), strict=False):
            pass


@pytest.mark.parametrize("case", RECURRENT)
def test_what_is_preempted_goes_on_right_and_what_is_left_holds_nothing(
    case: str, model: Callable[[str], StateModel], start_states: Start
):
    """Two requests are let in where not quite two have room in the end."""
    prompts = [make_prompt(70, (case, "crowd", number)) for number in range(6)]
    with start_states(model(case), "--max_total_token_num", str(15 * PAGE), "--max_req_total_len", "160") as server:
        server.check_all(prompts, 6, num_tokens=60)
        assert server.call("router", "statistics")["num_preemptions"] > 0
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda index: leave_after(server, prompts[index], 8 * index + 1), range(len(prompts))))
        server.check_clean()
        server.check_all(prompts, 2)
