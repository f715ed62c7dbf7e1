from pathlib import Path

import pytest

from serve.bench.flags import BenchError, resolve_options
from serve.bench.options import ServeBenchOptions
from serve.bench.presets import PRESETS, preset_values, scenario_values
from serve.bench.prompts import WordPrompts, prompt_maker
from serve.bench.workload import build_workload


def shape(name: str) -> tuple[int, int, int, int, int]:
    """(conversations, turns, tokens of the first question, output tokens, passes) of a preset."""
    options = resolve_options(ServeBenchOptions, preset_values(name))
    workload = build_workload(options, prompt_maker(options.uses_token_ids, 32000, None), 1, 0)
    turns = {len(conversation.turns) for conversation in workload}
    inputs = {conversation.turns[0].input_len for conversation in workload}
    outputs = {turn.output_len for conversation in workload for turn in conversation.turns}
    assert len(turns) == len(inputs) == len(outputs) == 1
    return len(workload), turns.pop(), inputs.pop(), outputs.pop(), options.passes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("S1", (1, 1, 512, 128, 1)),
        ("S2", (8, 1, 512, 128, 1)),
        ("S3", (32, 1, 256, 64, 1)),
        ("S4", (1, 1, 1500, 16, 2)),
        ("S5", (16, 4, 800, 64, 1)),
        ("S6", (40, 1, 1500, 16, 2)),
    ],
)
def test_presets_have_the_shapes_they_are_known_by(name: str, expected: tuple[int, ...]) -> None:
    assert shape(name) == expected


def test_histories_of_s5_are_about_a_thousand_tokens() -> None:
    options = resolve_options(ServeBenchOptions, preset_values("s5"))
    (first, *_) = build_workload(options, WordPrompts(), 1, 0)
    histories, length = [], 0
    for turn in first.turns:
        length += turn.input_len
        histories.append(length)
        length += turn.output_len
    assert histories == [800, 928, 1056, 1184]


def test_s6_prompts_go_one_after_another() -> None:
    assert resolve_options(ServeBenchOptions, preset_values("S6")).concurrency == 1


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(BenchError, match="S1, S2, S3, S4, S5, S6"):
        preset_values("S7")


def test_a_scenario_may_start_from_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("preset: S2\noutput_len: 4\n")
    assert scenario_values(path) == {**PRESETS["S2"], "output_len": 4}


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "3: 4\n", "preset: S99\n"])
def test_a_bad_scenario_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        scenario_values(path)
    assert "\n" not in str(caught.value)


def test_a_missing_scenario_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--scenario"):
        scenario_values(tmp_path / "none.yaml")
