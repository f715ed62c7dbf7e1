"""`varve bench static`: the engine's own step times over a grid of cells, against the limits of the machine."""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tqdm import tqdm

from models.config import ModelConfig
from serve.bench.cells import Cell, HardwareLimits, Operation, Phase, cached_tokens, operations
from serve.bench.flags import BenchError, add_option_flags, given_values, resolve_options
from serve.bench.report import format_number, format_table, write_json
from serve.bench.static_options import StaticBenchOptions


@dataclass(frozen=True)
class CellResult:
    """A cell's time and what it is worth. seconds: of a whole prefill, or of one decode step."""

    cell: Cell
    hit_rate: float
    seconds: float
    limit_seconds: float
    operations: list[Operation]

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed a second."""
        return self.cell.batch * self.cell.new_tokens / self.seconds

    @property
    def share(self) -> float:
        """Of the limit's speed, what was achieved."""
        return self.limit_seconds / self.seconds


class _CellRun(Protocol):
    @property
    def step_seconds(self) -> list[float]: ...

    @property
    def cached_tokens(self) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `varve bench static`."""
    add_option_flags(parser, StaticBenchOptions)


def main(args: argparse.Namespace) -> int:
    """Run the grid; BenchError when it cannot."""
    options = resolve_options(StaticBenchOptions, given_values(args, StaticBenchOptions))
    if not options.model:
        raise BenchError("--model is missing")
    run_grid(options)
    return 0


def grid(options: StaticBenchOptions) -> list[tuple[Cell, float]]:
    """All cells with their hit rates; decode cells have everything before their token cached, whatever the rate.

    Rates that come to the same number of cached pages are one cell.
    """
    cells: dict[Cell, float] = {}
    for phase in options.phase:
        for batch in options.batch:
            for context in options.context:
                for rate in options.hit_rate if phase is Phase.PREFILL else [1.0]:
                    cached = cached_tokens(context, rate, options.page_size)
                    if phase is Phase.DECODE:
                        cached = context - 1
                    cells.setdefault(Cell(phase, batch, context, cached), rate)
    return list(cells.items())


def run_grid(options: StaticBenchOptions) -> None:
    """Measure the machine, then every cell; print the table and write the file."""
    # torch takes a second to import, and checking flags needs none of it.
    from serve.bench.limits import measure_limits
    from serve.bench.static_engine import StaticEngine

    cells = grid(options)
    engine = StaticEngine(options, [cell for cell, _ in cells])
    limits = measure_limits(engine.device, engine.dtype)
    results = []
    shown = options.progress and sys.stderr.isatty()
    for cell, rate in tqdm(cells, desc="cells", leave=False, disable=not shown):
        seconds = measure_cell(engine.run, cell, options.repeat)
        counted = operations(engine.config, cell, engine.data_type)
        results.append(CellResult(cell, rate, seconds, limits.seconds(counted), counted))
    problems = engine.check_integrity()
    if problems:
        raise BenchError(f"the engine's books do not add up: {problems[0]}")
    title = f"{options.model} {engine.data_type} on {engine.device.type}"
    print(format_results(title, limits, results))
    if options.json_file is not None:
        write_json(options.json_file, as_plain_data(options, engine.config, limits, results))


def measure_cell(run: Callable[[Cell], _CellRun], cell: Cell, repeat: int) -> float:
    """Median seconds of `repeat` runs after one that is not counted: of a whole prefill, or of a decode step.

    Raises BenchError when the ledger did not give the hits that the cell stands for.
    """
    times = []
    for number in range(repeat + 1):
        measured = run(cell)
        if cell.phase is Phase.PREFILL and measured.cached_tokens != cell.cached * cell.batch:
            raise BenchError(f"{measured.cached_tokens} tokens were hits where {cell.cached * cell.batch} were due")
        if number == 0:
            continue
        steps = measured.step_seconds
        times.append(sum(steps) if cell.phase is Phase.PREFILL else statistics.median(steps))
    return statistics.median(times)


def format_results(title: str, limits: HardwareLimits, results: list[CellResult]) -> str:
    """The limits in one line, then a row a cell."""
    rows = [["phase", "batch", "context", "cached", "ms", "tok/s", "GB", "GFLOP", "limit ms", "of limit"]]
    for result in results:
        cell = result.cell
        rows.append(
            [
                cell.phase.value,
                str(cell.batch),
                str(cell.context),
                str(cell.cached) if cell.phase is Phase.PREFILL else "-",
                format_number(result.seconds * 1e3),
                format_number(result.tokens_per_s),
                format_number(sum(o.num_bytes for o in result.operations) / 1e9),
                format_number(sum(o.flops for o in result.operations) / 1e9),
                format_number(result.limit_seconds * 1e3),
                f"{result.share:.2f}",
            ]
        )
    measured = f"read {limits.read_bytes_per_s / 1e9:.1f} GB/s, matmul {limits.flops_per_s / 1e9:,.0f} GFLOP/s"
    return f"{title}; limits measured: {measured}\n{format_table(rows)}"


def as_plain_data(
    options: StaticBenchOptions, config: ModelConfig, limits: HardwareLimits, results: list[CellResult]
) -> dict[str, Any]:
    """Everything for `--json`, with the operations of each cell."""
    return {
        "options": options.model_dump(mode="json", by_alias=True),
        "config": config.to_dict(),
        "limits": asdict(limits),
        "cells": [
            {
                "phase": result.cell.phase.value,
                "batch": result.cell.batch,
                "context": result.cell.context,
                "cached": result.cell.cached,
                "hit_rate": result.hit_rate,
                "seconds": result.seconds,
                "tokens_per_s": result.tokens_per_s,
                "limit_seconds": result.limit_seconds,
                "share_of_limit": result.share,
                "operations": [asdict(operation) for operation in result.operations],
            }
            for result in results
        ],
    }
