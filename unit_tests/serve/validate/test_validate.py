"""`varve cache validate`: right states pass, and each way to lose one is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config import CompressionConfig, load_model_config
from models.source import resolve_model
from models.state_layout import derive_layout
from serve import cli
from serve.validate.command import boundaries, format_report
from serve.validate.sequences import Sequence, Snapshot, StateEngine
from serve.validate.states import NUM_CONTINUED, check_states, unnoticed
from serve.validate.tiers import Text, TierCheck, is_same_text, usable
from unit_tests.models.state_families import build, save

PAGE, BOUNDARY = 16, 48


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3_next", max_position_embeddings=512), tmp_path_factory.mktemp("model"))


def engine_of(directory: Path, kind: type[StateEngine] = StateEngine) -> StateEngine:
    source = resolve_model(str(directory))
    config = load_model_config(source)
    return kind(config, source, "float32", PAGE, torch.device("cpu"), BOUNDARY + NUM_CONTINUED, 4)


def test_right_states_have_no_problem(directory: Path):
    report = check_states(engine_of(directory), "float32", BOUNDARY)
    assert report.problems == []
    assert report.restored == 0
    assert report.missed < 1e-4
    assert [leaf.leaf for leaf in report.leaves] == ["kv", "recurrent", "conv_q", "conv_k", "conv_v"]
    assert all(leaf.lost > 1e-2 for leaf in report.leaves)
    assert report.leaves[1].object_bytes == 3 * 4 * 16 * 24 * 4


class Forgetful(StateEngine):
    """Loses the recurrent states between snapshot and restore."""

    def restore(self, snapshot: Snapshot) -> Sequence:
        sequence = super().restore(snapshot)
        self.drop(sequence, "recurrent", "recurrent")
        return sequence


def test_a_lost_state_is_told(directory: Path):
    report = check_states(engine_of(directory, Forgetful), "float32", BOUNDARY)
    assert not report.is_restored
    assert report.is_hit_equal
    assert any("a restored state gives other logits" in line for line in report.problems)


class Incomplete(StateEngine):
    """Forgets the first page of keys and values: what a restored sequence reads there is no number."""

    def snapshot(self, sequence: Sequence) -> Snapshot:
        whole = super().snapshot(sequence)
        full = {place: data for place, data in whole.objects["full"].items() if place}
        return replace(whole, objects={**whole.objects, "full": full})


def test_a_missing_page_is_told(directory: Path):
    report = check_states(engine_of(directory, Incomplete), "float32", BOUNDARY)
    assert report.restored == float("inf")
    assert not report.is_restored


class Blind(StateEngine):
    """A check of the loss of a leaf that loses nothing."""

    def drop(self, sequence: Sequence, group: str, leaf: str) -> None:
        if leaf != "conv_k":
            super().drop(sequence, group, leaf)


def test_a_loss_that_nobody_would_notice_is_told(directory: Path):
    blind, seeing = (check_states(engine_of(directory, kind), "float32", BOUNDARY) for kind in (Blind, StateEngine))
    assert blind.problems == []
    assert unnoticed([blind]) == ["the loss of recurrent.conv_k is not noticed"]
    assert unnoticed([blind, seeing]) == []


def test_boundaries_lie_on_both_sides_of_a_window(directory: Path):
    config = load_model_config(resolve_model(str(directory)))
    assert boundaries(config, 16) == [16, 48]
    assert boundaries(replace(config, window=100), 16) == [16, 144]
    assert boundaries(replace(config, window=1000), 16) == [16, 480]
    indexed = CompressionConfig(4, 16, index_head_dim=16, index_top_k=20)
    assert boundaries(replace(config, compression=indexed), 16) == [16, 128]
    with pytest.raises(ValueError, match="too short"):
        boundaries(replace(config, max_position_embeddings=30), 16)


def test_texts_in_bfloat16_may_part_at_a_near_tie_only():
    cached = {"device": 0, "host": 0, "disk": 0}
    one, other = Text([5, 6, 7], [2.0, 0.1, 3.0], cached), Text([5, 9, 8], [2.0, 0.1, 3.0], cached)
    assert is_same_text(one, one, "float32")
    assert not is_same_text(one, other, "float32")
    assert is_same_text(one, other, "bfloat16")
    assert not is_same_text(replace(one, leads=[2.0, 1.0, 3.0]), other, "bfloat16")


def test_the_last_token_of_a_prompt_is_always_computed():
    assert [usable(length, 16) for length in (1, 16, 17, 32, 33)] == [0, 0, 16, 16, 32]


def test_the_table_names_what_is_wrong(directory: Path):
    config = load_model_config(resolve_model(str(directory)))
    report = check_states(engine_of(directory, Blind), "float32", BOUNDARY)
    tiers = [TierCheck("host", 4, 96, 80, 1)]
    text = format_report(derive_layout(config, PAGE, "float32"), [report], tiers, ["bad"])
    assert "recurrent.conv_k" in text
    assert "THE SAME" in text
    assert "80 of 96" in text
    assert "1 OTHERS" in text
    assert text.endswith("bad")


def test_the_command_prints_json_and_gives_0(directory: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--states_only", "--json", "--cpu_cache_token_page_size", "16"]
    assert cli.main(["cache", "validate", str(directory), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert [report["boundary"] for report in found["states"]] == [16, 48]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["/nowhere"], 1, "/nowhere"),
        (["m", "--cpu_cache_token_page_size", "20"], 2, "multiple of 16"),
        (["m", "--data_type", "float16"], 2, "float16"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(
    words: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["cache", "validate", *words]) == code
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
