"""`varve bench cache --paired`: what the CPU cache gains and costs, two servers in turns, one with it and one without.

Both servers stay up, and the one that is not asked sleeps, so that what else the machine does falls on both alike. The
turns change order from round to round (A B B A), and a ratio is the median of those of the rounds.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from serve.bench.cache_options import CacheBenchOptions, Setup
from serve.bench.cache_server import running_server
from serve.bench.flags import BenchError, resolve_options
from serve.bench.options import ServeBenchOptions
from serve.bench.own_server import BenchServer
from serve.bench.presets import PRESETS
from serve.bench.report import format_number, format_table
from serve.bench.serve import BenchRun, bench
from serve.cache_operations import ROUTER, ask_in
from serve.ipc.control import ControlError

OFF, ON = Setup.DEVICE, Setup.HOST
PAIRED_SIZES: Mapping[str, object] = {"device_tokens": 46592, "cpu_cache_storage_size": 2.0}
"""A device pool of about 1 GiB of SmolLM2's pages, and a host that has room for all of S6."""
NO_HITS = "no hits"
WORKLOADS: Mapping[str, Mapping[str, object]] = {
    NO_HITS: {"num_requests": 8, "input_len": 1000, "output_len": 32},
    **{name: PRESETS[name] for name in ("S1", "S2", "S3", "S4")},
    "S5": {**PRESETS["S5"], "num_requests": 4},
}
NO_HITS_ROUNDS = 3  # times as many rounds as of the others: its limit is near
MAX_SLOWDOWN, MAX_COST = 1.03, 1.03
MAX_HOST_SHARE = 1 / 20  # of the first token's time when it is recomputed
PREFIX_LEN = 3000
S6_LIMIT_MS = 110.0
_SETTLE_S = 30.0
_MAX_ROUNDS = 1000
PREFIX, S6 = "prefix", "S6"


@dataclass
class Row:
    """One figure of both servers. ratio: on / off; limit: what it, or `on` where there is no `off`, may be."""

    name: str
    unit: str
    limit: float
    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Median over the rounds; None of a figure that only one server has."""
        return statistics.median(on / off for on, off in zip(self.on, self.off, strict=True)) if self.off else None

    @property
    def is_met(self) -> bool:
        """Whether the limit is kept."""
        ratio = self.ratio
        return (ratio if ratio is not None else statistics.median(self.on)) <= self.limit

    def as_data(self) -> dict[str, Any]:
        """For `--json`."""
        return {**vars(self), "ratio": self.ratio, "is_met": self.is_met}


def run_paired(options: CacheBenchOptions) -> list[Row]:
    """All figures. Raises BenchError when a server does not start or a request fails."""
    with ExitStack() as stack:
        servers = {setup: stack.enter_context(running_server(options, setup)) for setup in (OFF, ON)}
        rows = [*_workloads(options, servers), _prefix(options, servers[ON]), _s6(options, servers[ON])]
    return rows


def _workloads(options: CacheBenchOptions, servers: Mapping[Setup, BenchServer]) -> list[Row]:
    """Seconds of each workload: with the cache none may take longer, and none without hits much longer."""
    rows = []
    for name, values in WORKLOADS.items():
        row = Row(f"{name}, duration", "s", MAX_COST if name == NO_HITS else MAX_SLOWDOWN)
        for number in range(options.paired_rounds * (NO_HITS_ROUNDS if name == NO_HITS else 1)):
            order = (OFF, ON) if number % 2 == 0 else (ON, OFF)
            for setup in order:
                run = _bench(options, servers[setup], name, values, number)
                seconds = sum(run.medians(each)["duration_s"] for each in run.passes)
                (row.off if setup is OFF else row.on).append(seconds)
        rows.append(_told(row))
    return rows


def _prefix(options: CacheBenchOptions, server: BenchServer) -> Row:
    """First token behind a long prefix: recomputed (off), and from the host after the device was emptied (on)."""
    row = Row(f"{PREFIX_LEN}-token prefix, first token", "ms", MAX_HOST_SHARE)
    values = {"num_requests": 1, "input_len": PREFIX_LEN, "output_len": 1}
    for number in range(options.paired_rounds):
        for figures in (row.off, row.on):
            run = _bench(options, server, PREFIX, values, number)
            figures.append(run.medians("pass 1")["ttft_ms"]["p50"])
            _empty_device(server)
    return _told(row)


def _s6(options: CacheBenchOptions, server: BenchServer) -> Row:
    """The second pass over more prompts than the device holds."""
    row = Row("S6, first token of the second pass", "ms", S6_LIMIT_MS)
    run = _bench(options, server, S6, PRESETS[S6], 0)
    row.on.append(run.medians("pass 2")["ttft_ms"]["p50"])
    return _told(row)


def _bench(
    options: CacheBenchOptions, server: BenchServer, figure: str, values: Mapping[str, object], number: int
) -> BenchRun:
    """One run with prompts that no other figure and no other round has; the same on both servers."""
    figures = (*WORKLOADS, PREFIX, S6)
    own = {
        "base_url": server.base_url,
        "repeat": 1,
        "seed": (options.seed * _MAX_ROUNDS + number) * len(figures) + figures.index(figure),
        "num_warmups": 1 if number == 0 else 0,
        "vocab_size": options.vocab_size,
        "timeout": options.timeout,
        "progress": False,
    }
    run = asyncio.run(bench(resolve_options(ServeBenchOptions, own, values)))
    if run.failures:
        raise BenchError(f"requests failed: {dict(run.failures)}")
    return run


def _empty_device(server: BenchServer) -> None:
    """Once all that the host wants has reached it."""
    ask, deadline = ask_in(server.run_dir), time.monotonic() + _SETTLE_S
    try:
        while (found := ask(ROUTER, "statistics"))["num_requests"] or found["jobs_in_flight"]:
            if time.monotonic() > deadline:
                raise BenchError(f"the server is not idle after {_SETTLE_S:g} s")
            time.sleep(0.01)
        ask(ROUTER, "flush")
    except ControlError as error:
        raise BenchError(f"the server's router does not answer: {error}") from error


def _told(row: Row) -> Row:
    print(_line(row), file=sys.stderr, flush=True)
    return row


def _line(row: Row) -> str:
    ratio = f"{row.ratio:.3f}" if row.ratio is not None else "-"
    return f"{row.name}: ratio {ratio}, {row.unit} with the cache {', '.join(map(format_number, row.on))}"


def format_rows(rows: Sequence[Row]) -> str:
    """A line a figure."""
    table = [["figure", "unit", "off", "on", "on / off", "limit", "met"]]
    for row in rows:
        off, on = (format_number(statistics.median(each) if each else None) for each in (row.off, row.on))
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else "-"
        limit = f"{row.limit:.3g}"
        table.append([row.name, row.unit, off, on, ratio, limit, "yes" if row.is_met else "NO"])
    note = "(off: without the CPU cache, or recomputed; the limit is that of on / off, or of on; medians of the rounds)"
    return f"{format_table(table)}\n{note}"
