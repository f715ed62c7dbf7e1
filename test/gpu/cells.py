"""All cells of the static benchmark on one engine, and where the time of each goes, kernel by kernel.

`python test/gpu/cells.py OUTPUT_DIR [--model DIR] [--phase decode,prefill]`: `varve bench static` measures a grid and
loads the model for each; this measures the cells that have targets, with one load, then runs each once more under the
profiler. Writes `cells.json`.
"""

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from serve.bench.cells import Cell, HardwareLimits, Phase, operations  # noqa: E402
from serve.bench.limits import measure_limits  # noqa: E402
from serve.bench.static import CellResult, format_results, measure_cell  # noqa: E402
from serve.bench.static_engine import StaticEngine  # noqa: E402
from serve.bench.static_options import StaticBenchOptions  # noqa: E402

STEP_BYTES = 8 << 20
SHAPE = ROOT / "test/gpu/shapes/qwen3-8b"
DECODE = [Cell(Phase.DECODE, batch, 1024, 1023) for batch in (1, 16, 64, 256)]
PREFILL = [Cell(Phase.PREFILL, 1, 8192, 0), Cell(Phase.PREFILL, 1, 32768, 0), Cell(Phase.PREFILL, 1, 32768, 32704)]
# Share of the limit, or seconds, that each cell is to reach.
TARGETS = {DECODE[0]: 0.80, DECODE[2]: 0.85, DECODE[3]: 0.83, PREFILL[0]: 0.83, PREFILL[1]: 0.82}


def kernel_times(engine: StaticEngine, cell: Cell) -> tuple[dict[str, tuple[int, float]], float]:
    """Launches and milliseconds by kernel of one run of a cell, all its steps; and milliseconds of gaps below 50 ms."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.run(cell)
    times: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time_total / 1e3)
            spans.append((event.time_range.start, event.time_range.end))
    idle, end = 0.0, None
    for begin, stop in sorted(spans):
        if end is not None and 0 < begin - end < 5e4:
            idle += begin - end
        end = stop if end is None else max(end, stop)
    return {name: (len(each), sum(each)) for name, each in times.items()}, idle / 1e3


def format_kernels(times: dict[str, tuple[int, float]], most: int = 14) -> str:
    """The kernels that take most, one a line."""
    total = sum(ms for _, ms in times.values())
    rows = sorted(times.items(), key=lambda item: -item[1][1])[:most]
    lines = [
        f"  {ms:9.3f} ms {ms / total:6.1%} {count:6d} x {1e3 * ms / count:9.2f} us  {name[:90]}"
        for name, (count, ms) in rows
    ]
    return "\n".join([f"  {total:9.3f} ms in kernels", *lines])


class Traffic:
    """Copies to page-locked memory and from it, both at once, until it is left; `rates` then has bytes a second."""

    def __init__(self, leaf: torch.Tensor, num_bytes: int = 1 << 30) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.untyped_storage())
        self._device = [flat[:num_bytes], flat[num_bytes : 2 * num_bytes]]
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        for host, device in zip(self._host, self._device, strict=True):
            host.copy_(device)
        self._stop = threading.Event()
        self.rates = [0.0, 0.0]

    def __enter__(self) -> "Traffic":
        self._threads = [threading.Thread(target=self._copy, args=(way,)) for way in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _copy(self, way: int) -> None:
        target, source = (self._host[0], self._device[0]) if way == 0 else (self._device[1], self._host[1])
        begin, count, done = time.perf_counter(), 0, torch.cuda.Event(blocking=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not self._stop.is_set():
                for start in range(0, len(target), STEP_BYTES):
                    part = slice(start, start + STEP_BYTES)
                    target[part].copy_(source[part], non_blocking=True)
                done.record()
                done.synchronize()
                count += 1
        self.rates[way] = count * len(target) / (time.perf_counter() - begin)


def measure_staging(engine: StaticEngine, cell: Cell) -> dict[str, float]:
    """Milliseconds of a decode step alone, and while pages move both ways at the full rate of the bus."""
    alone = measure_cell(engine.run, cell, 3)
    leaf = next(iter(next(iter(engine.leaves.values())).values()))
    with Traffic(leaf) as traffic:
        beside = measure_cell(engine.run, cell, 5)
    loss = beside / alone - 1
    out, into = (rate / 1e9 for rate in traffic.rates)
    copies = f"beside copies of {out:.1f} GB/s out and {into:.1f} in"
    print(f"decode {cell.batch}: {alone * 1e3:.3f} ms alone, {beside * 1e3:.3f} {copies}: {loss:.1%} lost")
    return {"alone_s": alone, "beside_copies_s": beside, "loss": loss, "out_gb_per_s": out, "in_gb_per_s": into}


def measure(engine: StaticEngine, cells: list[Cell], limits: HardwareLimits) -> list[CellResult]:
    results = []
    for cell in cells:
        counted = operations(engine.config, cell, engine.data_type)
        seconds = measure_cell(engine.run, cell, 3)
        results.append(CellResult(cell, 0.0, seconds, limits.seconds(counted), counted))
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--phase", default="decode,prefill")
    parser.add_argument("--batch_max_tokens", type=int, default=8192)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    cells = (DECODE if "decode" in args.phase else []) + (PREFILL if "prefill" in args.phase else [])
    options = StaticBenchOptions(
        model=args.model, load_format="dummy", device="cuda", batch_max_tokens=args.batch_max_tokens, decode_steps=32
    )
    engine = StaticEngine(options, cells)
    limits = measure_limits(engine.device, engine.dtype)
    results = measure(engine, cells, limits)
    print(format_results(args.model, limits, results), flush=True)
    plain = []
    for result in results:
        times, idle = kernel_times(engine, result.cell)
        name = f"{result.cell.phase.value} {result.cell.batch} x {result.cell.context}, {result.cell.cached} cached"
        share = f"{result.share:.2f} of the limit, {idle:.2f} ms of gaps"
        print(f"{name}: {result.seconds * 1e3:.3f} ms, {share}\n{format_kernels(times)}")
        plain.append({
            "cell": {**asdict(result.cell), "phase": result.cell.phase.value},
            "seconds": result.seconds,
            "limit_seconds": result.limit_seconds,
            "share": result.share,
            "target": TARGETS.get(result.cell),
            "kernels": times,
        })  # fmt: skip
    staging = measure_staging(engine, DECODE[2]) if "decode" in args.phase else {}
    problems = engine.check_integrity()
    (args.output / "cells.json").write_text(
        json.dumps({"limits": asdict(limits), "cells": plain, "staging": staging}, indent=1)
    )
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
