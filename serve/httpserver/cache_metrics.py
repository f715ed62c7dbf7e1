"""The cache's part of /metrics: families with labels, out of the statistics of router and cache manager."""

from collections.abc import Iterable
from typing import Any

from serve.cache_report import Data, TierReport, number_of, numbers_of, part_of, tier_reports
from serve.httpserver.metric_families import by_label, counter, gauge, histogram

# Estimates of the router's cost model: statistics' name -> metric's name.
_ESTIMATES = {
    "prefill_tokens_per_s": "varve_cache_estimated_prefill_tokens_per_second",
    "decode_step_s": "varve_cache_estimated_decode_step_seconds",
    "load_bytes_per_s": "varve_cache_estimated_load_bytes_per_second",
    "promotion_bytes_per_s": "varve_cache_estimated_promotion_bytes_per_second",
}
_DIRECTIONS = ("loads", "stores")
_RESULTS = ("done", "failed", "dropped", "cancelled")
_DISK_EVENTS = ("index_resets", "stray_segments", "shrunk_segments", "useless_rows", "stores_refused")
_DISK_OUTCOMES = ("done", "failed", "refused", "missing", "corrupt")


def cache_families(router: Data, cache: Data) -> Iterable[Any]:
    """Families of both parts' statistics; an empty dict stands for a part that does not answer."""
    yield gauge("varve_cache_manager_up", "Whether the cache manager answers", (), {(): float(bool(cache))})
    yield from _tiers(tier_reports(router, cache))
    if router:
        yield from _of_router(router)
    if part_of(cache, "slots"):
        yield from _of_manager(cache)
    yield from _transfers(part_of(router, "tiers"), part_of(cache, "lower_tier"))
    if part_of(cache, "lower_tier"):
        yield from _of_disk(part_of(cache, "lower_tier"))


def _tiers(reports: list[TierReport]) -> Iterable[Any]:
    states = {(report.tier, state): count for report in reports for state, count in report.pages.items()}
    yield gauge("varve_cache_tier_pages", "Pages of a tier by state", ("tier", "state"), states)
    for name, text, values in (
        ("size_bytes", "Bytes that a tier may hold", {(r.tier,): r.total_bytes for r in reports}),
        ("used_bytes", "Bytes that a tier holds", {(r.tier,): r.used_bytes for r in reports}),
    ):
        known = {labels: value for labels, value in values.items() if value is not None}
        yield gauge(f"varve_cache_tier_{name}", text, ("tier",), known)
    for name, text, counts in (
        ("hit_requests", "Requests that used a tier", {(r.tier,): r.hit_requests for r in reports}),
        ("hit_tokens", "Prompt tokens that a tier saved computing", {(r.tier,): r.hit_tokens for r in reports}),
        ("evicted_pages", "Pages that made room for others", {(r.tier,): r.evicted_pages for r in reports}),
        ("checksum_failures", "Pages whose bytes were damaged", {(r.tier,): r.checksum_failures for r in reports}),
    ):
        yield counter(f"varve_cache_{name}", text, ("tier",), counts)
    ages = {(report.tier,): report.eviction_ages for report in reports}
    yield histogram("varve_cache_eviction_age_seconds", "Since an evicted page's last use", ("tier",), ages)


def _of_router(router: Data) -> Iterable[Any]:
    tiers = part_of(router, "tiers")
    for name, text in (
        ("misses", "Requests that no tier had anything for"),
        ("lookups", "Questions to the cache manager"),
        ("lookups_late", "Lookups that were not answered in time"),
        ("flushes", "Flushes"),
    ):
        yield counter(f"varve_cache_{name}", text, (), {(): number_of(tiers, f"num_{name}")})
    queues = {("jobs",): number_of(router, "jobs_in_flight"), ("loads",): number_of(router, "loads_in_progress")}
    yield gauge("varve_cache_queue_jobs", "Jobs under way between device and host", ("queue",), queues)
    for source, name in _ESTIMATES.items():
        text = "What the router expects, by what it has measured"
        yield gauge(name, text, (), {(): number_of(router, source)} if source in router else {})


def _of_manager(cache: Data) -> Iterable[Any]:
    probed, hit = numbers_of(part_of(cache, "pages_probed")), numbers_of(part_of(cache, "pages_hit"))
    found = {(group, "hit"): hit.get(group, 0) for group in probed}
    found |= {(group, "miss"): count - hit.get(group, 0) for group, count in probed.items()}
    yield counter("varve_cache_probed_pages", "Pages that lookups asked the host for", ("group", "result"), found)
    slots = by_label(part_of(cache, "slots"))
    yield gauge("varve_cache_host_slots", "Slots of the host arena by state", ("state",), slots)
    leases = by_label(part_of(cache, "leases"))
    yield gauge("varve_cache_leases_jobs", "Leases of jobs by kind and phase", ("lease",), leases)
    for name, text, label, source in (
        ("dropped_pages", "Pages that left the host, by reason", "reason", "drops"),
        ("refused_loads", "Loads that the host refused, by outcome", "outcome", "loads_refused"),
        ("withheld_pages", "Pages in the host that a policy kept from disk, by reason", "reason", "pages_withheld"),
        ("events", "Unusual things in the cache manager", "event", "events"),
    ):
        yield counter(f"varve_cache_{name}", text, (label,), by_label(part_of(cache, source)))
    for name, text in (
        ("pages_published", "Pages that came into the host from the device"),
        ("pages_promoted", "Pages that came into the host from disk"),
        ("pages_persisted", "Pages that went from the host to disk"),
        ("pages_refused", "Pages that found no room in the host"),
    ):
        what, verb = name.split("_")
        yield counter(f"varve_cache_{verb}_{what}", text, (), {(): number_of(cache, name)})


def _transfers(tiers: Data, disk: Data) -> Iterable[Any]:
    """Between device and host as the router sees it (`host`), between host and disk as the disk tier does (`disk`)."""
    moved: dict[tuple[str, ...], float] = {}
    jobs: dict[tuple[str, ...], float] = {}
    times: dict[str, dict[tuple[str, ...], Data]] = {direction: {} for direction in _DIRECTIONS}
    for direction in _DIRECTIONS if tiers else ():
        one = part_of(tiers, direction)
        moved["host", direction[:-1]] = number_of(one, "num_bytes")
        jobs |= {("host", direction[:-1], result): number_of(one, f"num_{result}") for result in _RESULTS}
        times[direction]["host",] = part_of(one, "job_s")
        drops = {(name.removeprefix("num_dropped_"),): v for name, v in numbers_of(one).items() if "dropped_" in name}
        text = "Loads that were not tried, or given up" if direction == "loads" else "Pages that were not stored"
        what = "abandoned_loads" if direction == "loads" else "unstored_pages"
        yield counter(f"varve_cache_{what}", f"{text}, by reason", ("reason",), drops)
    for direction in _DIRECTIONS if disk else ():
        moved["disk", direction[:-1]] = number_of(disk, {"loads": "bytes_loaded", "stores": "bytes_stored"}[direction])
        jobs |= {("disk", direction[:-1], each): number_of(disk, f"{direction}_{each}") for each in _DISK_OUTCOMES}
        times[direction]["disk",] = part_of(disk, f"{direction[:-1]}_times")
    labels = ("tier", "direction")
    yield counter("varve_cache_moved_bytes", "Bytes loaded from, and stored into, a tier", labels, moved)
    yield counter("varve_cache_transfers", "Transfers by how they ended", (*labels, "result"), jobs)
    yield histogram("varve_cache_load_seconds", "From a load's start to its end", ("tier",), times["loads"])
    yield histogram("varve_cache_store_seconds", "From a store's start to its end", ("tier",), times["stores"])


def _of_disk(disk: Data) -> Iterable[Any]:
    depth = {("queued",): number_of(disk, "queued"), ("in_flight",): number_of(disk, "in_flight")}
    yield gauge("varve_cache_disk_queue_transfers", "Transfers that wait, and all under way", ("state",), depth)
    segments = {("served",): number_of(disk, "segments"), ("foreign",): number_of(disk, "foreign_segments")}
    yield gauge("varve_cache_disk_segments", "Segment files, by whether this model uses them", ("kind",), segments)
    yield gauge(
        "varve_cache_disk_segments_bytes", "Bytes of all segment files", (), {(): number_of(disk, "used_bytes")}
    )
    yield gauge(
        "varve_cache_disk_off", "1: the tier has turned itself off", (), {(): disk.get("off_reason") is not None}
    )
    yield gauge(
        "varve_cache_disk_paused", "1: nothing is stored after an error", (), {(): number_of(disk, "is_paused")}
    )
    lost = {(name,): number_of(disk, name) for name in _DISK_EVENTS}
    yield counter("varve_cache_disk_events", "What was lost at the start, or not taken", ("event",), lost)
    yield counter(
        "varve_cache_disk_errors", "Errors of reads, writes and the index", (), {(): number_of(disk, "errors")}
    )
