"""`varve bench profile`: where the time to the first token and the time per token go, on a server of its own."""

import argparse
import asyncio
import shlex
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from pydantic import BaseModel, ConfigDict, Field

from serve.bench.flags import BenchError, add_option_flags, given_values, resolve_options
from serve.bench.options import ServeBenchOptions
from serve.bench.own_server import BenchServer, own_server
from serve.bench.presets import preset_values
from serve.bench.profile_report import Measured, breakdown, format_breakdown, read_metrics
from serve.bench.report import write_json
from serve.bench.serve import BenchRun, bench
from serve.ipc.control import ControlClient, ControlError

CONTROL_TIMEOUT_S = 60.0


class ProfileOptions(BaseModel):
    """All options of one run; the flags are generated from the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field("smollm2-135m", description="what to serve, as for varve serve")
    preset: str = Field("S1", description="workload, as for varve bench serve")
    repeat: int = Field(5, ge=1, description="runs with fresh prompts, each without and with the profiler")
    seed: int = Field(0, ge=0, description="makes prompts repeatable")
    vocab_size: int = Field(32000, ge=16, description="prompts are random token ids below this")
    serve_flags: str = Field("", description="further flags of varve serve, in one argument")
    start_timeout: float = Field(600.0, gt=0, description="seconds until the server must be ready")
    json_file: Path | None = Field(None, alias="json", description="write all figures to this file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `varve bench profile`."""
    add_option_flags(parser, ProfileOptions)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark. 0: all requests were answered; 1: some failed. BenchError when it cannot run."""
    options = resolve_options(ProfileOptions, given_values(args, ProfileOptions))
    with own_server(options.model, shlex.split(options.serve_flags), options.start_timeout) as server:
        plain = _play(options, server, options.seed, num_warmups=1)
        profiled = _measure(options, server)
    figures = breakdown(profiled)
    print(f"{options.model}, {options.preset}, means of {options.repeat} repeats")
    print(format_breakdown(figures, _latencies(plain)))
    if options.json_file is not None:
        shown = options.model_dump(mode="json", by_alias=True)
        measured = {"steps": profiled.steps, "metrics": profiled.metrics, "figures": profiled.figures}
        write_json(options.json_file, {"options": shown, "breakdown": figures, "measured": measured})
    return 1 if plain.failures else 0


def _play(options: ProfileOptions, server: BenchServer, seed: int, num_warmups: int) -> BenchRun:
    layers = {"base_url": server.base_url, "server_pid": server.pid, "repeat": options.repeat}
    layers |= {"seed": seed, "num_warmups": num_warmups, "passes": 1, "vocab_size": options.vocab_size}
    return asyncio.run(bench(resolve_options(ServeBenchOptions, layers, dict(preset_values(options.preset)))))


def _measure(options: ProfileOptions, server: BenchServer) -> Measured:
    """The workload with other prompts, so that nothing of it is cached, while the worker records its steps."""
    client = ControlClient(server.run_dir, "control-worker-0", CONTROL_TIMEOUT_S)
    before = _scrape(server)
    try:
        client.call("profile_start")
        run = _play(options, server, options.seed + 1, num_warmups=0)
        steps = client.call("profile_stop")
    except ControlError as error:
        raise BenchError(f"the worker cannot be profiled: {error}") from error
    finally:
        client.close()
    after = _scrape(server)
    if run.failures:
        raise BenchError(f"{sum(run.failures.values())} requests failed")
    metrics = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Measured(steps, metrics, [each.figures for each in run.passes["pass 1"]])


def _scrape(server: BenchServer) -> dict[str, float]:
    opener = build_opener(ProxyHandler({}))
    with opener.open(f"{server.base_url}/metrics", timeout=10) as response:
        return read_metrics(response.read().decode())


def _latencies(run: BenchRun) -> dict[str, Any]:
    """Mean first-token time and time per token, ms, of a run without the profiler."""
    passes = [each.figures for each in run.passes["pass 1"]]
    return {name: _mean([figures[name]["mean"] for figures in passes if figures[name]]) for name in _SHOWN}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_SHOWN = ("ttft_ms", "tpot_ms")
