"""`varve bench cache`: prompts that share what they should, figures that add up, servers started as asked."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve import cli
from serve.bench.cache import client_options, shuffled_rounds
from serve.bench.cache_figures import Figures, format_results, make_figures
from serve.bench.cache_options import CacheBenchOptions, Setup
from serve.bench.cache_plot import save_cache_plot
from serve.bench.cache_server import running_server, serve_flags
from serve.bench.flags import BenchError, resolve_options
from serve.bench.metrics import RequestRecord
from serve.bench.prompts import TokenIdPrompts
from serve.bench.workload import build_workload


def options(**changes: object) -> CacheBenchOptions:
    return resolve_options(CacheBenchOptions, changes)


def record(ttft: float | None, tiers: dict[str, int], failure: str | None = None) -> RequestRecord:
    return RequestRecord(0, 0, 0.0, 1.0, 100, 4, 4, ttft=ttft, cached_by_tier=tiers, failure=failure)


def test_each_prefix_comes_once_and_then_once_a_round_with_new_suffixes() -> None:
    chosen = options(prefix_len=8, suffix_len=2, rounds=2)
    requests = build_workload(client_options(chosen, "http://x", 3), TokenIdPrompts(32000), 0, 0)
    order = shuffled_rounds(requests[3:], 3, 0, 0)
    prompts = [request.turns[0].prompt for request in [*requests[:3], *order]]
    prefixes = [tuple(prompt[:8]) for prompt in prompts]
    assert len(set(prefixes[:3])) == 3
    assert {*prefixes[3:6]} == {*prefixes[6:9]} == {*prefixes[:3]}
    assert len({tuple(prompt) for prompt in prompts}) == 9
    assert shuffled_rounds(requests[3:], 3, 0, 0) == order


def test_hit_rates_are_shares_of_what_was_asked_again() -> None:
    cold = [record(2.0, {"device": 0})]
    again = [record(0.1, {"device": 60, "host": 0}), record(0.3, {"device": 0, "host": 80, "disk": 10})]
    figures = make_figures(5, cold, [*again, record(None, {}, failure="timeout")])
    assert figures.hit_rate == {"device": 0.3, "host": 0.4, "disk": 0.05}
    assert figures.ttft_p50_ms == pytest.approx(200)
    assert (figures.cold_ttft_p50_ms, figures.num_failed, figures.working_set) == (2000, 1, 5)
    line = format_results({"disk": [figures]}).splitlines()[1]
    assert line.split() == ["disk", "5", "75%", "30%", "40%", "5%", "200.0", "290.0", "2,000", "1"]


def test_each_setup_adds_a_tier() -> None:
    chosen = options(serve_flags="--tp 2 --data_type 'float32'")
    lines = {setup: " ".join(serve_flags(chosen, setup, Path("/d"))) for setup in Setup}
    for setup, line in lines.items():
        assert line.startswith("--max_total_token_num 2560")
        assert line.endswith("--tp 2 --data_type float32")
        assert ("--enable_cpu_cache" in line) == (setup is not Setup.DEVICE)
        assert ("--disk_cache_dir /d" in line) == (setup is Setup.DISK)


def test_options_are_lists_by_commas() -> None:
    chosen = options(working_sets="2, 4,8", setups="device,disk")
    assert (chosen.working_sets, chosen.setups) == ([2, 4, 8], [Setup.DEVICE, Setup.DISK])
    for wrong in ({"working_sets": "2,x"}, {"working_sets": ""}, {"setups": "gpu"}, {"working_sets": "0"}):
        with pytest.raises(BenchError, match="--"):
            options(**wrong)


def test_a_server_that_does_not_start_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    chosen = options(model="no-such-model", disk_cache_dir=tmp_path)
    with pytest.raises(BenchError, match="the server ended with 1: model 'no-such-model' is not"):  # noqa: SIM117
        with running_server(chosen, Setup.DISK):
            pytest.fail("it runs")
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(BenchError, match="--disk_cache_dir"),
        running_server(options(disk_cache_dir=tmp_path / "no"), Setup.DEVICE),
    ):
        pytest.fail("it runs")


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    rates = {"device": 0.5, "host": 0.25, "disk": 0.0}
    results = {name: [Figures(3, rates, 10.0, 20.0, 90.0, 0), Figures(8, rates, None, None, None, 0)] for name in rates}
    save_cache_plot(tmp_path / "plot.png", "title", results)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(chosen: CacheBenchOptions, setup: Setup) -> list[Figures]:
        return [
            Figures(n, dict.fromkeys(("device", "host", "disk"), 0.1), 1.0, 2.0, 3.0, 0) for n in chosen.working_sets
        ]

    monkeypatch.setattr("serve.bench.cache._run_setup", measured)
    file: Any = tmp_path / "figures.json"
    assert cli.main(["bench", "cache", "--setups", "host", "--json", str(file), "--plot", str(tmp_path / "p.png")]) == 0
    assert "host" in capsys.readouterr().out
    data = json.loads(file.read_text())
    assert [each["working_set"] for each in data["results"]["host"]] == [3, 8, 20]
    assert data["options"]["setups"] == ["host"]


def test_its_help_is_quick_to_import() -> None:
    code = "import sys, serve.bench.cache; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0
