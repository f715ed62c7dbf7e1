"""Two ranks over gloo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.parallel import SingleRank
from serve.model_infer.tp_group import join_group, smallest
from unit_tests.serve.model_infer.builders import CPU
from unit_tests.serve.model_infer.tiny_llama import model_dir
from unit_tests.serve.model_infer.tp_member import texts

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    command = [sys.executable, "-m", "unit_tests.serve.model_infer.tp_member"]
    processes = [
        subprocess.Popen([*command, str(rank), str(model_dir())], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_one_rank_needs_no_group(tmp_path: Path):
    group = join_group(0, 1, CPU, tmp_path / "store", 5)
    assert isinstance(group, SingleRank)
    assert smallest(group, 7, CPU) == 7


def test_collectives_reach_every_rank(ranks: list[dict[str, Any]]):
    for result in ranks:
        assert result["collectives"] == {
            "summed": [[3.0] * 3] * 2,
            "gathered": [[0.0, 0.0, 0.0, 1.0, 1.0]] * 2,
            "told": [1, 6],
            "smallest": 9,
        }


def test_two_ranks_give_the_texts_of_one(ranks: list[dict[str, Any]]):
    alone = texts(SingleRank(), model_dir())
    first, second = (rank["texts"] for rank in ranks)
    assert list(first["texts"].values()) == list(alone["texts"].values())
    assert (first["rank"], first["rows"]) == (0, [1])
    assert (second["rank"], second["rows"]) == (1, [])
    assert second["last"] == first["last"] == alone["last"]
