import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve import cli
from serve.config import ServeConfig
from serve.config_resolve import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What `varve serve` would launch, instead of launching it."""
    configs: list[ServeConfig] = []

    def launch(config: ServeConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("serve.launcher.launch.launch", launch)
    return configs


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["m"], {"model": "m", "port": 8000}),
        (["m", "--port", "9000", "--tp=2"], {"port": 9000, "tp": 2}),
        (["--max-queue-size", "5", "m"], {"model": "m", "max_queue_size": 5}),
        (["m", "--max_queue-size=6"], {"max_queue_size": 6}),
        (["m", "--hf_offline"], {"hf_offline": True}),
        (["--hf-offline", "m"], {"model": "m", "hf_offline": True}),
        (["m", "--hf_offline", "--no-hf-offline"], {"hf_offline": False}),
        (["m", "--mem-fraction", "0.5", "--data-type", "float32"], {"mem_fraction": 0.5, "data_type": "float32"}),
        (["m", "--served-model-name", "a-b_c"], {"served_model_name": "a-b_c"}),
        (["m", "--run-dir", "/tmp/x"], {"run_dir": Path("/tmp/x")}),
    ],
)
def test_flags_reach_the_config(launched: list[ServeConfig], words: list[str], expected: dict[str, Any]) -> None:
    assert cli.main(["serve", *words]) == 0
    assert {name: getattr(launched[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["serve"], "MODEL is missing"),
        (["serve", "m", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "m", "--max-queue-siz=1"], "unknown flag --max-queue-siz; did you mean --max_queue_size?"),
        (["serve", "m", "--zzzzzz"], "unknown flag --zzzzzz"),
        (["serve", "m", "extra"], "unexpected argument 'extra'"),
        (["serve", "m", "--por", "1"], "unknown flag --por; did you mean --port?"),
        (["serve", "m", "--port"], "argument --port: expected one argument"),
        (["serve", "m", "--port", "many"], "--port: input should be a valid integer, unable to parse"),
        (["serve", "m", "--port", "65536"], "--port: input should be less than or equal to 65535, got '65536'"),
        (["serve", "m", "--tp", "0"], "--tp: input should be greater than or equal to 1, got '0'"),
        (["serve", "m", "--mem_fraction", "nan"], "--mem_fraction: input should be"),
        (["serve", "m", "--device", "tpu"], "--device: input should be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        (["serve", "m", "--config", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["serv", "m"], "unknown command 'serv'; the commands are serve, pull, bench, cache; did you mean serve?"),
        (["--verbose"], "unknown flag --verbose"),
        (["bench", "nonsense"], "argument benchmark: invalid choice: 'nonsense'"),
        (["bench"], "the following arguments are required: benchmark"),
        (["pull"], "the following arguments are required: NAME"),
    ],
)
def test_mistakes_are_one_line(
    launched: list[ServeConfig], capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"varve: error: {line}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert launched == []


def test_help_explains_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, info in ServeConfig.model_fields.items():
        assert ("MODEL" if name == "model" else f"--{name}") in text
        assert info.description
        assert info.description in text
    assert "port to listen on; 0 takes a free one (default: 8000)" in text
    assert "{auto,bfloat16,float32}" in text
    assert "(default: )" not in text
    assert "(default: False)" not in text  # of a switch nobody wonders
    assert f"default: {CPU_BATCH_TOKENS} on a CPU, {CUDA_BATCH_TOKENS} on CUDA" in text


def test_a_model_that_is_nowhere_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("varve: error: model 'no-such-model' is not")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("words", "text"), [(["--version"], "varve "), ([], "usage: varve"), (["-h"], "usage: varve")])
def test_the_command_explains_itself(words: list[str], text: str) -> None:
    done = subprocess.run([sys.executable, "-m", "serve.cli", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(text)


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys; from serve import cli; cli.main(['serve', 'm', '--bad']); import serve.launcher.launch;"
        "print([name for name in ('torch', 'transformers', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_ctrl_c_finds_the_command_ready_for_it() -> None:
    code = (
        "import sys; from serve import cli;"
        "print([name for name in ('pydantic', 'msgspec', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n"
