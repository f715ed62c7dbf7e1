"""The readable side of the figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from serve.bench.flags import BenchError

ROWS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, all others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_number(value: float | None) -> str:
    """Four significant digits or so; a dash where there is no figure."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def format_pass(title: str, figures: dict[str, Any], failures: dict[str, int]) -> str:
    """The text of one pass. figures: from `summarize`, or their medians; failures: by kind, over all repeats."""
    latency = [["ms", *COLUMNS]]
    for label, key in ROWS:
        values = figures[key] or {}
        latency.append([label, *(format_number(values.get(column)) for column in COLUMNS)])
    lines = [title, format_table(latency), _throughput(figures), _tokens(figures)]
    if failures:
        lines.append("failures: " + ", ".join(f"{kind} {count}" for kind, count in sorted(failures.items())))
    if figures["short_answers"]:
        lines.append(f"{figures['short_answers']:.0f} answers were shorter than asked for")
    if not figures["counted_by_server"]:
        lines.append("the server sent no usage: token counts are the expected input and the number of events")
    if figures.get("server_cpu_s"):
        lines.extend(_cpu(figures))
    return "\n".join(lines)


def _throughput(figures: dict[str, Any]) -> str:
    return (
        f"{figures['completed']:.0f} of {figures['requests']:.0f} requests in {figures['duration_s']:.2f} s: "
        f"{format_number(figures['output_tokens_per_s'])} output tok/s, "
        f"{format_number(figures['total_tokens_per_s'])} total tok/s, "
        f"{format_number(figures['requests_per_s'])} req/s"
    )


def _tokens(figures: dict[str, Any]) -> str:
    cached = figures["cached_tokens"]
    text = f"{figures['input_tokens']:.0f} tokens in, {figures['output_tokens']:.0f} out; cached: "
    if cached is None:
        return text + "not told"
    tiers = ", ".join(f"{tier} {count:.0f}" for tier, count in figures["cached_tokens_by_tier"].items())
    share = cached / figures["input_tokens"] if figures["input_tokens"] else 0.0
    return text + f"{cached:.0f} ({share:.0%})" + (f": {tiers}" if tiers else "")


def _cpu(figures: dict[str, Any]) -> list[str]:
    """CPU seconds by role, and milliseconds a step."""
    counted = figures.get("server_steps")
    steps = counted or figures["decode_steps"]
    rows = [["CPU", "seconds", "ms a step"]]
    for role, seconds in sorted(figures["server_cpu_s"].items()):
        rows.append([role, f"{seconds:.2f}", f"{seconds / steps * 1e3:.3f}" if steps else "-"])
    source = "steps, by the server's count" if counted else "decode steps, estimated from the streams"
    return [format_table(rows), f"({steps:.0f} {source})"]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Indented JSON; BenchError when the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1))
    except OSError as error:
        raise BenchError(f"--json {path}: {error.strerror}") from error
