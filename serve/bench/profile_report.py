"""Breakdown of latencies out of what client, HTTP process, router and worker have measured of the same requests.

The four measure intervals that contain each other, each with one clock; a part is the difference of two such. For
workloads in which requests do not overlap all parts of a first-token time add up to it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.bench.report import format_number, format_table

_PLAIN = re.compile(r"^(varve_\w+) (\S+)$", re.MULTILINE)
_FIRST = "first token"
_TOKEN = "a token"


@dataclass(frozen=True)
class Measured:
    """steps: `StepProfiler.stop` of the worker. metrics: what those without labels grew by. figures: of each repeat."""

    steps: Mapping[str, Any]
    metrics: Mapping[str, float]
    figures: list[dict[str, Any]]


def read_metrics(text: str) -> dict[str, float]:
    """Metrics without labels by name."""
    return {name: float(value) for name, value in _PLAIN.findall(text)}


def breakdown(measured: Measured) -> dict[str, dict[str, float]]:
    """Milliseconds by part of a request's first token, of a token after it, and CPU of processes for a step."""
    figures = measured.figures
    num_requests = sum(each["completed"] for each in figures)
    if not num_requests or "decode" not in measured.steps or "prefill" not in measured.steps:
        return {}
    ttft = sum(each["ttft_ms"]["mean"] * each["completed"] for each in figures) / num_requests
    tpot = sum(each["tpot_ms"]["mean"] * each["completed"] for each in figures) / num_requests
    num_steps = sum(total["steps"] for total in measured.steps.values())
    return {
        _FIRST: _first_token(measured, ttft, num_requests),
        _TOKEN: _token(measured, tpot),
        "CPU a step": _cpu(figures, num_steps),
    }


def _first_token(measured: Measured, ttft: float, num_requests: float) -> dict[str, float]:
    prepare, at_http, in_router, queue = (
        _mean_ms(measured.metrics, name)
        for name in (
            "varve_http_prepare_seconds",
            "varve_http_first_token_seconds",
            "varve_router_first_token_seconds",
            "varve_router_queue_seconds",
        )
    )
    worker = _worker_parts(measured.steps["prefill"], num_requests)
    return {
        "client, connection, HTTP parsing": ttft - prepare - at_http,
        "HTTP process: body, tokens, page names": prepare,
        "messages HTTP process to router and back": at_http - in_router,
        "router: queue": queue,
        "messages router to worker and back": in_router - queue - sum(worker.values()),
        **worker,
        "total": ttft,
    }


def _token(measured: Measured, tpot: float) -> dict[str, float]:
    decode = measured.steps["decode"]
    worker = _worker_parts(decode, decode["steps"])
    return {**worker, "elsewhere: streaming to the client": tpot - sum(worker.values()), "total": tpot}


def _worker_parts(total: Mapping[str, Any], count: float) -> dict[str, float]:
    """Milliseconds by part of the steps of a kind, by request or by step as `count` says."""
    phases = {name: seconds * 1e3 / count for name, seconds in total["phases"].items()}
    kernels = {name: entry[1] * 1e3 / count for name, entry in total["kernels"].items()}
    parts = {"worker: waiting for a plan": phases["wait"]} if "wait" in phases else {}
    parts["worker: the step's tensors"] = phases.get("prepare", 0.0)
    parts |= {f"kernel {name}": ms for name, ms in sorted(kernels.items(), key=lambda item: -item[1])}
    parts["worker: Python between kernels"] = phases.get("forward", 0.0) - sum(kernels.values())
    parts["worker: sampling"] = phases.get("sample", 0.0)
    parts["worker: answer"] = phases.get("answer", 0.0)
    return parts


def _cpu(figures: list[dict[str, Any]], num_steps: float) -> dict[str, float]:
    """Milliseconds of CPU a step by role; on few cores it competes with the worker."""
    roles = sorted({role for each in figures for role in each.get("server_cpu_s") or ()})
    return {
        role: sum((each.get("server_cpu_s") or {}).get(role, 0.0) for each in figures) * 1e3 / num_steps
        for role in roles
    }


def _mean_ms(metrics: Mapping[str, float], name: str) -> float:
    """Mean of a histogram, in ms."""
    count = metrics.get(f"{name}_count", 0.0)
    return metrics.get(f"{name}_sum", 0.0) * 1e3 / count if count else 0.0


def format_breakdown(figures: Mapping[str, Mapping[str, float]], plain: Mapping[str, float]) -> str:
    """Tables of all breakdowns. plain: mean `ttft_ms` and `tpot_ms` without the profiler."""
    if not figures:
        return "no prefill and decode steps were recorded"
    parts = []
    for title, rows in figures.items():
        total = rows.get("total")
        table = [[title, "ms", "share"]]
        table += [[name, format_number(ms), f"{ms / total:.1%}" if total else ""] for name, ms in rows.items()]
        parts.append(format_table(table))
    parts.append(f"without the profiler: first token {plain['ttft_ms']:.1f} ms, a token {plain['tpot_ms']:.2f} ms")
    return "\n\n".join(parts)
