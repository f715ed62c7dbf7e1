import json
from pathlib import Path

import pytest

from serve.bench.flags import BenchError, resolve_options
from serve.bench.options import ServeBenchOptions
from serve.bench.prompts import Prompt, TokenIdPrompts, WordPrompts
from serve.bench.trace import read_trace
from serve.bench.workload import Conversation, build_warmup, build_workload

IDS = TokenIdPrompts(32000)


def options(**values: object) -> ServeBenchOptions:
    return resolve_options(ServeBenchOptions, values)


def prompts(workload: list[Conversation]) -> list[Prompt]:
    return [turn.prompt for conversation in workload for turn in conversation.turns]


def test_the_same_seed_gives_the_same_workload() -> None:
    chosen = options(num_requests=5, input_len="10:20", output_len="1:9", arrival="poisson", rate=3)
    assert build_workload(chosen, IDS, 7, 2) == build_workload(chosen, IDS, 7, 2)


@pytest.mark.parametrize("workload", ["random", "multi_turn", "shared_prefix"])
def test_no_two_prompts_of_any_repeat_or_seed_are_equal(workload: str) -> None:
    chosen = options(num_requests=4, input_len=24, workload=workload, prefix_len=8)
    maker = WordPrompts()
    made = [p for seed in (1, 2) for repeat in (0, 1, 2) for p in prompts(build_workload(chosen, maker, seed, repeat))]
    warm = prompts(build_warmup(chosen, maker, build_workload(chosen, maker, 1, 0)[0].turns[0], 1))
    assert len({str(p) for p in made + warm}) == len(made) + 1


def test_a_prompt_does_not_depend_on_how_many_there_are() -> None:
    few = build_workload(options(num_requests=2), IDS, 7, 0)
    many = build_workload(options(num_requests=9), IDS, 7, 0)
    assert prompts(many)[:2] == prompts(few)


def test_lengths_are_within_their_ranges() -> None:
    workload = build_workload(options(num_requests=50, input_len="10:20", output_len="1:9"), IDS, 1, 0)
    turns = [conversation.turns[0] for conversation in workload]
    assert all(len(turn.prompt) == turn.input_len for turn in turns)
    assert {turn.input_len for turn in turns} <= set(range(10, 21))
    assert {turn.output_len for turn in turns} == set(range(1, 10))


def test_shared_prefixes_are_shared_in_turn_and_differ_by_repeat() -> None:
    chosen = options(workload="shared_prefix", num_requests=4, num_prefixes=2, prefix_len=16, input_len=4)
    made = prompts(build_workload(chosen, IDS, 1, 0))
    heads = [tuple(p[:16]) for p in made]
    assert heads[0] == heads[2] != heads[1] == heads[3]
    assert [len(p) for p in made] == [20] * 4
    assert len({tuple(p[16:]) for p in made}) == 4
    assert tuple(prompts(build_workload(chosen, IDS, 1, 1))[0][:16]) != heads[0]


def test_warm_up_is_short_and_of_the_same_input_length() -> None:
    chosen = options(num_warmups=2)
    (like,) = build_workload(chosen, IDS, 1, 0)[0].turns
    warmup = build_warmup(chosen, IDS, like, 1)
    assert [(c.turns[0].input_len, c.turns[0].output_len) for c in warmup] == [(512, 16)] * 2
    assert like.prompt not in prompts(warmup)


def write_trace(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return path


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 20, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 1000, "input_length": 18, "output_length": 6, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "prompt": "hello", "output_length": 7},
        {"timestamp": 4000, "input_length": 30, "hash_ids": [1]},
    )
    chosen = options(workload="trace", trace=path, trace_block=8, trace_speed=2, output_len=11)
    workload = build_workload(chosen, IDS, 1, 0)
    assert [c.offset for c in workload] == [0.0, 0.5, 1.0, 1.5]
    assert [c.turns[0].output_len for c in workload] == [6, 7, 5, 11]
    first, text, second, third = prompts(workload)
    assert text == "hello"
    assert [len(first), len(second), len(third)] == [18, 20, 30]
    assert first[:16] == second[:16]
    assert first[:8] == third[:8]
    assert first[16:] != second[16:18]
    assert third[8:16] != first[8:16]


def test_a_trace_can_be_cut_and_played_in_another_rhythm(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", *({"timestamp": i, "input_length": 4} for i in range(5)))
    chosen = options(workload="trace", trace=path, num_requests=3, arrival="fixed", rate=10)
    assert [c.offset for c in build_workload(chosen, IDS, 1, 0)] == [0.0, 0.1, 0.2]


@pytest.mark.parametrize("text", ["", "{", '{"timestamp": 1}', '{"input_length": "x"}', "[]"])
def test_a_bad_trace_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        read_trace(path, None)
    assert "\n" not in str(caught.value)


def test_a_missing_trace_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "none", None)
