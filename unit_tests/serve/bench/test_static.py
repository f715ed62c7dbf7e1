import pytest

from models.config import ModelConfig, RopeConfig
from serve import cli
from serve.bench import static
from serve.bench.cells import Cell, HardwareLimits, Phase, operations
from serve.bench.flags import BenchError, resolve_options
from serve.bench.static_engine import CellRun
from serve.bench.static_options import StaticBenchOptions

CONFIG = ModelConfig(
    "LlamaForCausalLM", "llama", 128, 32, 64, 2, 4, 2, 8, 1e-5, RopeConfig("default", 1e4, 8), 512, True
)  # fmt: skip


def options(**values: object) -> StaticBenchOptions:
    return resolve_options(StaticBenchOptions, {"model": "m", **values})


def test_lists_are_read_and_checked() -> None:
    assert options(batch="1, 8", hit_rate="0,.5", phase="decode").batch == [1, 8]
    for bad in ({"batch": "0"}, {"batch": ""}, {"hit_rate": "1.5"}, {"phase": "train"}):
        with pytest.raises(BenchError):
            options(**bad)


def test_the_grid_is_every_combination_once() -> None:
    cells = static.grid(options(batch="1,2", context="256", hit_rate="0,0.5,0.51"))
    assert cells == [
        (Cell(Phase.PREFILL, 1, 256, 0), 0.0),
        (Cell(Phase.PREFILL, 1, 256, 128), 0.5),
        (Cell(Phase.PREFILL, 2, 256, 0), 0.0),
        (Cell(Phase.PREFILL, 2, 256, 128), 0.5),
        (Cell(Phase.DECODE, 1, 256, 255), 1.0),
        (Cell(Phase.DECODE, 2, 256, 255), 1.0),
    ]


def test_a_prefill_is_the_sum_and_a_decode_the_median_of_its_steps() -> None:
    runs = iter([CellRun([9.0, 9.0], 64), CellRun([1.0, 2.0], 64), CellRun([2.0, 2.0], 64), CellRun([9.0, 1.0], 64)])
    assert static.measure_cell(lambda cell: next(runs), Cell(Phase.PREFILL, 1, 100, 64), 3) == 4.0
    assert static.measure_cell(lambda cell: CellRun([1.0, 2.0, 9.0], 0), Cell(Phase.DECODE, 1, 9, 8), 1) == 2.0


def test_hits_that_do_not_come_are_an_error() -> None:
    with pytest.raises(BenchError, match="0 tokens were hits where 128 were due"):
        static.measure_cell(lambda cell: CellRun([1.0], 0), Cell(Phase.PREFILL, 2, 100, 64), 1)


def test_the_table_and_the_file_say_the_same() -> None:
    limits = HardwareLimits(1e9, 1e9)
    cell = Cell(Phase.PREFILL, 2, 100, 64)
    counted = operations(CONFIG, cell, "float32")
    result = static.CellResult(cell, 0.64, 0.5, limits.seconds(counted), counted)
    header, columns, row = static.format_results("title", limits, [result]).splitlines()
    assert header == "title; limits measured: read 1.0 GB/s, matmul 1 GFLOP/s"
    assert columns.split()[:4] == ["phase", "batch", "context", "cached"]
    assert row.split()[:6] == ["prefill", "2", "100", "64", "500.0", "144.0"]
    (written,) = static.as_plain_data(options(), CONFIG, limits, [result])["cells"]
    assert written["tokens_per_s"] == 144.0
    assert written["share_of_limit"] == pytest.approx(
        sum(o["flops"] for o in written["operations"]) / 1e9 / 0.5, rel=0.2
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "--model is missing"),
        (["--model", "m", "--batch", "x"], "--batch"),
        (["--model", "./none"], "model './none' is not"),
        (["--modle", "m"], "unknown flag --modle"),
    ],
)
def test_what_cannot_run_is_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "static", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"varve: error: {line}")
    assert error.count("\n") == 1
