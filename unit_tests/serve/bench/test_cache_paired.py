"""`varve bench cache --paired`: turns of two servers, ratios of rounds, and limits."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve import cli
from serve.bench import cache_paired
from serve.bench.cache_options import CacheBenchOptions, Setup
from serve.bench.cache_paired import (
    MAX_HOST_SHARE,
    NO_HITS,
    NO_HITS_ROUNDS,
    PREFIX_LEN,
    WORKLOADS,
    Row,
    format_rows,
    run_paired,
)
from serve.bench.flags import resolve_options
from serve.bench.options import ServeBenchOptions

SLOWER = 1.02


class Servers:
    """Two servers that only note what they are asked; that with the cache is 2% slower, and 40 times faster on hits."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ServeBenchOptions]] = []
        self.emptied = 0

    @contextlib.contextmanager
    def start(self, options: CacheBenchOptions, setup: Setup) -> Iterator[Any]:
        yield SimpleNamespace(base_url=f"http://{setup.value}", run_dir=Path(setup.value))

    async def bench(self, options: ServeBenchOptions) -> Any:
        is_again = any(each.seed == options.seed for _, each in self.asked if each.input_len.low == 3000)
        self.asked.append((options.base_url, options))
        seconds = SLOWER if options.base_url.endswith("host") else 1.0
        ttft = 50.0 if options.passes == 2 or is_again else 2000.0
        medians = {"duration_s": seconds, "ttft_ms": {"p50": ttft}}
        passes = {f"pass {number + 1}": [] for number in range(options.passes)}
        return SimpleNamespace(passes=passes, medians=lambda name: medians, failures={})

    def ask(self, socket: str, method: str, **arguments: object) -> Any:
        self.emptied += method == "flush"
        return {"num_requests": 0, "jobs_in_flight": 0}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(cache_paired, "running_server", servers.start)
    monkeypatch.setattr(cache_paired, "bench", servers.bench)
    monkeypatch.setattr(cache_paired, "ask_in", lambda run_dir: servers.ask)
    return servers


def test_both_servers_get_the_same_prompts_in_turns(servers: Servers):
    rows = run_paired(resolve_options(CacheBenchOptions, {"paired_rounds": 2}))
    assert [row.name.partition(",")[0] for row in rows] == [*WORKLOADS, "3000-token prefix", "S6"]
    turns = [(url, options.seed) for url, options in servers.asked[: 4 * NO_HITS_ROUNDS]]
    first, second = turns[0][1], turns[2][1]
    assert turns[:4] == [
        ("http://device", first),
        ("http://host", first),
        ("http://host", second),
        ("http://device", second),
    ]
    assert len(set(turns)) == len(turns)
    of_host = [
        options for url, options in servers.asked if url.endswith("host") and options.input_len.low != PREFIX_LEN
    ]
    assert len({options.seed for options in of_host}) == len(of_host), "no prompt is another one's beginning"
    ratios: Mapping[str, float | None] = {row.name: row.ratio for row in rows}
    assert ratios[f"{NO_HITS}, duration"] == pytest.approx(SLOWER)
    assert ratios["3000-token prefix, first token"] == pytest.approx(50 / 2000)
    assert all(row.is_met for row in rows)
    assert servers.emptied == 4


def test_a_limit_that_is_missed_is_told():
    rows = [Row("a", "s", 1.03, [1.0, 1.0, 2.0], [1.1, 1.0, 2.5]), Row("b", "ms", 110.0, [], [109.0])]
    assert [row.is_met for row in rows] == [False, True]
    lines = format_rows(rows).splitlines()
    assert lines[1].split() == ["a", "s", "1.00", "1.10", "1.100", "1.03", "NO"]
    assert lines[2].split() == ["b", "ms", "-", "109.0", "-", "110", "yes"]
    assert pytest.approx(0.05) == MAX_HOST_SHARE


def test_the_command_writes_its_figures(servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "figures.json"
    assert cli.main(["bench", "cache", "--paired", "--json", str(file)]) == 0
    assert "no hits, duration" in capsys.readouterr().out
    data = json.loads(file.read_text())
    assert data["options"]["device_tokens"] == 46592
    assert {row["name"] for row in data["rows"]} >= {"S1, duration", "S5, duration"}
