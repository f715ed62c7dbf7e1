"""`varve bench serve`: loads any OpenAI-compatible server over HTTP and reports latencies, throughput and cache use."""

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve.bench.client import CompletionClient
from serve.bench.cpu_usage import ServerCpu
from serve.bench.flags import BenchError, add_option_flags, given_values, resolve_options
from serve.bench.metrics import RequestRecord, median_of, summarize
from serve.bench.options import ServeBenchOptions
from serve.bench.plot import save_plot
from serve.bench.presets import PRESETS, preset_values, scenario_values
from serve.bench.prompts import prompt_maker
from serve.bench.report import format_pass, write_json
from serve.bench.runner import play
from serve.bench.workload import Conversation, build_warmup, build_workload


@dataclass
class PassRun:
    """One pass of one repeat."""

    name: str
    records: list[RequestRecord]
    figures: dict[str, Any]


@dataclass
class BenchRun:
    """All that a run measured; passes[name] holds one `PassRun` a repeat."""

    seed: int
    model: str
    passes: dict[str, list[PassRun]] = field(default_factory=dict)

    @property
    def failures(self) -> Counter[str]:
        """Failed requests by kind, over everything."""
        return sum((self.failures_of(name) for name in self.passes), Counter())

    def failures_of(self, name: str) -> Counter[str]:
        """Failed requests of one pass by kind, over all repeats."""
        return Counter(r.failure for run in self.passes[name] for r in run.records if r.failure is not None)

    def medians(self, name: str) -> dict[str, Any]:
        """Figures of one pass, medians of the repeats."""
        return median_of([run.figures for run in self.passes[name]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `varve bench serve`."""
    parser.add_argument("--preset", metavar="X", help=f"a standard workload: {', '.join(PRESETS)}; flags override it")
    parser.add_argument("--scenario", metavar="X", help="YAML or JSON file with values of these flags")
    add_option_flags(parser, ServeBenchOptions)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark. 0: all requests were answered; 1: some failed. BenchError when it cannot run."""
    options = options_from(args)
    run = _run_loop(bench(options))
    print(format_run(options, run))
    _write_files(options, run)
    return 1 if run.failures else 0


def options_from(args: argparse.Namespace) -> ServeBenchOptions:
    """Command line over scenario file over preset over defaults."""
    layers = [given_values(args, ServeBenchOptions)]
    if args.scenario is not None:
        layers.append(dict(scenario_values(Path(args.scenario))))
    if args.preset is not None:
        layers.append(dict(preset_values(args.preset)))
    return resolve_options(ServeBenchOptions, *layers)


async def bench(options: ServeBenchOptions) -> BenchRun:
    """All repeats, each with fresh prompts, and in each all passes over the same prompts."""
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    maker = prompt_maker(options.uses_token_ids, options.vocab_size, options.tokenizer)
    cpu = ServerCpu(options.server_pid) if options.server_pid is not None else None
    client = CompletionClient(options)
    await client.resolve_model()
    run = BenchRun(seed, client.model, {f"pass {number + 1}": [] for number in range(options.passes)})
    for repeat in range(options.repeat):
        workload = build_workload(options, maker, seed, repeat)
        if repeat == 0:
            await _warm_up(client, options, build_warmup(options, maker, workload[0].turns[0], seed))
        for number, name in enumerate(run.passes):
            if number:
                await asyncio.sleep(options.pass_pause)
            label = f"repeat {repeat + 1}/{options.repeat} {name}"
            run.passes[name].append(await _run_pass(client, options, workload, name, label, cpu))
    return run


async def _warm_up(client: CompletionClient, options: ServeBenchOptions, conversations: list[Conversation]) -> None:
    """BenchError when the server does not answer as it should: measuring it would tell nothing."""
    for record in await play(client, conversations, options.endpoint, 1, lambda record: None):
        if record.failure is not None:
            raise BenchError(f"the warm-up request failed: {record.failure}: {record.failure_detail}")


async def _run_pass(
    client: CompletionClient,
    options: ServeBenchOptions,
    workload: list[Conversation],
    name: str,
    label: str,
    cpu: ServerCpu | None,
) -> PassRun:
    total = sum(len(conversation.turns) for conversation in workload)
    shown = options.progress and sys.stderr.isatty()
    with tqdm(total=total, desc=label, unit="req", leave=False, disable=not shown) as bar:
        steps = await client.num_steps() if cpu is not None else None
        if cpu is not None:
            cpu.restart()
        own = _own_cpu()
        records = await play(client, workload, options.endpoint, options.concurrency, lambda record: _tick(bar))
    figures = summarize(records) | {"client_cpu_s": _own_cpu() - own}
    if cpu is not None:
        figures["server_cpu_s"] = cpu.seconds()
        steps_now = await client.num_steps()
        figures["server_steps"] = steps_now - steps if steps is not None and steps_now is not None else None
    return PassRun(name, records, figures)


def _tick(bar: "tqdm[Any]") -> None:
    bar.update(1)


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _run_loop(work: Coroutine[Any, Any, BenchRun]) -> BenchRun:
    """On uvloop where it is installed: it costs the shared cores less."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def format_run(options: ServeBenchOptions, run: BenchRun) -> str:
    """The whole report as text."""
    medians = f", medians of {options.repeat} repeats" if options.repeat > 1 else ""
    parts = [f"{run.model} at {options.base_url}, seed {run.seed}{medians}"]
    for name in run.passes:
        title = f"\n{name}:" if len(run.passes) > 1 else ""
        parts.append(format_pass(title, run.medians(name), dict(run.failures_of(name))).lstrip("\n"))
    details = {
        r.failure: r.failure_detail for runs in run.passes.values() for p in runs for r in p.records if r.failure
    }
    parts.extend(f"{kind}: {detail}" for kind, detail in details.items())
    return "\n".join(parts)


def as_plain_data(options: ServeBenchOptions, run: BenchRun) -> dict[str, Any]:
    """The whole run for `--json`, without the gaps between tokens and without the API key."""
    return {
        "options": options.model_dump(mode="json", by_alias=True, exclude={"api_key"}) | {"seed": run.seed},
        "model": run.model,
        "medians": {name: run.medians(name) for name in run.passes},
        "repeats": [
            {name: runs[repeat].figures for name, runs in run.passes.items()} for repeat in range(options.repeat)
        ],
        "requests": [
            {"repeat": repeat, "pass": name, **_plain_record(record)}
            for name, runs in run.passes.items()
            for repeat, pass_run in enumerate(runs)
            for record in pass_run.records
        ],
    }


def _plain_record(record: RequestRecord) -> dict[str, Any]:
    return {
        name: value
        for name in RequestRecord.__dataclass_fields__
        if name not in ("itls", "event_times") and (value := getattr(record, name)) is not None
    }


def _write_files(options: ServeBenchOptions, run: BenchRun) -> None:
    if options.json_file is not None:
        write_json(options.json_file, as_plain_data(options, run))
    if options.plot is not None:
        passes = {name: runs[-1].records for name, runs in run.passes.items()}
        try:
            save_plot(options.plot, f"{run.model}: {options.workload.value}, last repeat", passes)
        except OSError as error:
            raise BenchError(f"--plot {options.plot}: {error.strerror}") from error
