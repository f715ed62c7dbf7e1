"""The router's part of /metrics: families with labels, out of its statistics."""

from collections.abc import Iterable
from typing import Any

from serve.cache_report import Data, number_of, numbers_of, part_of
from serve.httpserver.metric_families import by_label, counter, gauge, histogram

# statistics' name -> (metric's name, help). The rest of `num_*` are counters.
_GAUGES = {
    "is_up": ("varve_router_engine_up", "1: the engine group runs"),
    "is_admitting": ("varve_router_admitting", "1: waiting requests are admitted"),
    "num_waiting": ("varve_router_waiting_requests", "Requests in the queue"),
    "num_running": ("varve_router_running_requests", "Requests in the batch"),
    "num_plans_in_flight": ("varve_router_plans_in_flight", "Plans without a result"),
    "pages_held_by_jobs": ("varve_router_pages_held_by_jobs", "Device pages that loads and stores hold"),
    "expected_output_fraction": ("varve_router_expected_output_ratio", "Expected share of max_tokens, as measured"),
}
_STATES = {"free", "used", "cached"}
_SHOWN_BY_STATUS = "num_requests"
_HISTOGRAMS = {
    "step_s": ("varve_router_step_seconds", "A step's computation, on the slowest rank"),
    "queue_s": ("varve_router_queue_seconds", "From a request's arrival to its first admission"),
    "first_token_s": ("varve_router_first_token_seconds", "From a request's arrival to its first token"),
    "request_s": ("varve_router_request_seconds", "From a request's arrival to its end"),
}


def router_families(router: Data) -> Iterable[Any]:
    """Families of the router's statistics but for its tiers; none when the router does not answer ({})."""
    yield gauge("varve_router_up", "Whether the router answers", (), {(): float(bool(router))})
    if not router:
        return
    for source, count in numbers_of(router).items():
        if source.startswith("num_") and source not in _GAUGES and source != _SHOWN_BY_STATUS:
            what = source.removeprefix("num_")
            yield counter(f"varve_router_{what}", f"{what.replace('_', ' ').capitalize()} since start", (), {(): count})
    cpu_s = {(): number_of(router, "router_cpu_s")}
    yield counter("varve_router_cpu_seconds", "CPU time of the router's turns", (), cpu_s)
    finished = by_label(part_of(router, "finished"))
    yield counter("varve_router_finished_requests", "Requests that have ended, by reason", ("reason",), finished)
    status = by_label(part_of(router, "by_status"))
    yield gauge("varve_router_requests", "Living requests by status", ("status",), status)
    for source, (name, text) in _GAUGES.items():
        if source in router:
            yield gauge(name, text, (), {(): number_of(router, source)})
    for source, (name, text) in _HISTOGRAMS.items():
        if part_of(router, source):
            yield histogram(name, text, (), {(): part_of(router, source)})
    yield from _of_pools(part_of(router, "pages"))


def _of_pools(pages: Data) -> Iterable[Any]:
    """pages: by state group."""
    pools = {name: part_of(pages, name) for name in pages}
    states = {(name, state): number_of(pool, state) for name, pool in pools.items() for state in _STATES & pool.keys()}
    yield gauge("varve_router_pages", "Device pages of a state group by state", ("group", "state"), states)
    for metric, text, key in (
        ("varve_router_capacity_pages", "Device pages that a state group has", "total"),
        ("varve_router_page_bytes", "Bytes of a page on all ranks together", "page_bytes"),
    ):
        yield gauge(metric, text, ("group",), {(name,): number_of(pool, key) for name, pool in pools.items()})
    evicted = {(name,): number_of(pool, "evicted") for name, pool in pools.items()}
    yield counter("varve_router_evicted_pages", "Cached device pages that made room for others", ("group",), evicted)
