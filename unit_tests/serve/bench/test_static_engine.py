import json
from pathlib import Path

import numpy as np
import pytest

from serve import cli
from serve.bench.cells import Cell, Phase
from serve.bench.flags import BenchError, resolve_options
from serve.bench.static_engine import PromptTable, StaticEngine
from serve.bench.static_options import StaticBenchOptions

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}

HYBRID = {
    **TINY,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
WINDOWS = {
    **TINY,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 32,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def options(model: Path, **values: object) -> StaticBenchOptions:
    fixed = {"model": str(model), "load_format": "dummy", "device": "cpu", "page_size": 16, "decode_steps": 3}
    return resolve_options(StaticBenchOptions, {**fixed, **values})


def test_cells_run_one_after_another_and_give_everything_back(model: Path) -> None:
    cells = [
        Cell(Phase.PREFILL, 2, 70, 0),
        Cell(Phase.PREFILL, 2, 70, 48),
        Cell(Phase.DECODE, 3, 40, 39),
        Cell(Phase.DECODE, 1, 2, 1),
    ]
    engine = StaticEngine(options(model, batch_max_tokens=64), cells)
    for _ in range(2):
        runs = [engine.run(cell) for cell in cells]
        assert [run.cached_tokens for run in runs[:2]] == [0, 96]
        assert [len(run.step_seconds) for run in runs] == [3, 1, 3, 3]
        assert all(second > 0 for run in runs for second in run.step_seconds)
        assert engine.check_integrity() == []


@pytest.mark.parametrize("config", [HYBRID, WINDOWS], ids=["states", "windows"])
def test_models_of_several_groups_run_too(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    cells = [Cell(Phase.PREFILL, 2, 70, 48), Cell(Phase.DECODE, 3, 40, 39)]
    engine = StaticEngine(options(tmp_path, batch_max_tokens=64), cells)
    for _ in range(2):
        assert [engine.run(cell).cached_tokens for cell in cells] == [96, 3 * 32]
        assert engine.check_integrity() == []


def test_a_prefill_is_cut_into_steps_of_the_token_budget(model: Path) -> None:
    cell = Cell(Phase.PREFILL, 3, 50, 0)
    engine = StaticEngine(options(model, batch_max_tokens=40), [cell])
    assert len(engine.run(cell).step_seconds) == 4


def test_what_does_not_fit_is_one_line(model: Path) -> None:
    with pytest.raises(BenchError, match="--context 300 is beyond the model's 256 positions"):
        StaticEngine(options(model), [Cell(Phase.PREFILL, 1, 300, 0)])
    with pytest.raises(BenchError, match="MiB are free"):
        StaticEngine(options(model), [Cell(Phase.PREFILL, 10**9, 250, 0)])


def test_a_prompt_table_keeps_a_prompt_a_slot() -> None:
    table = PromptTable(2)
    table.fill(1, np.arange(3, dtype=np.uint32))
    assert (table.generation(1), table.tokens(1).tolist(), table.tokens(0).tolist()) == (1, [0, 1, 2], [])
    assert table.sampling(0).temperature == 0.0


def test_a_grid_prints_a_table_and_writes_the_file(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.bench import limits

    monkeypatch.setattr(limits, "_CPU_READ_BYTES", 16 << 20)
    monkeypatch.setattr(limits, "_CPU_MATMUL_SIZE", 256)
    flags = f"--model {model} --load_format dummy --device cpu --page_size 16 --decode_steps 2 --batch 1,2 --context 40"
    flags += f" --hit_rate 0,0.5 --repeat 1 --json {model}/out.json --progress false"
    assert cli.main(["bench", "static", *flags.split()]) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [
        ["prefill", "1", "40", "0"],
        ["prefill", "1", "40", "16"],
        ["prefill", "2", "40", "0"],
        ["prefill", "2", "40", "16"],
        ["decode", "1", "40", "-"],
        ["decode", "2", "40", "-"],
    ]
    written = json.loads((model / "out.json").read_text())
    assert len(written["cells"]) == 6
    assert written["limits"]["flops_per_s"] > 0
