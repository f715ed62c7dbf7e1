"""What `varve cache` prints: tables of plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from serve.cache_report import number_of, numbers_of, part_of
from serve.units import format_bytes


def format_stats(found: Mapping[str, Any]) -> str:
    """One line a tier, then transfers, reasons and what the router expects."""
    rows = [["tier", "size", "used", "pages", "hit requests", "hit tokens", "evicted", "damaged"]]
    for tier in found.get("tiers", []):
        pages = ", ".join(f"{count} {state}" for state, count in tier["pages"].items() if count)
        sizes = [format_bytes(tier["total_bytes"]), format_bytes(tier["used_bytes"])]
        counts = [str(tier[name]) for name in ("hit_requests", "hit_tokens", "evicted_pages", "checksum_failures")]
        rows.append([tier["tier"], *sizes, pages or "none", *counts])
    lines = [format_columns(rows)]
    lines += [f"{tier['tier']} is off: {tier['off_reason']}" for tier in found.get("tiers", []) if tier["off_reason"]]
    lines += [f"{part} is away: {why}" for part, why in found.get("away", {}).items()]
    router = part_of(found, "router")
    if router:
        lines += ["", *_transfers(part_of(router, "tiers")), "", _expectations(router)]
    dropped = _reasons(part_of(found, "cache", "drops"))
    withheld = _reasons(part_of(found, "cache", "pages_withheld"))
    lines += [f"left the host: {dropped}"] if dropped else []
    lines += [f"kept from disk by the policy: {withheld}"] if withheld else []
    return "\n".join(lines)


def _transfers(tiers: Mapping[str, Any]) -> list[str]:
    rows = [["host transfers", "jobs", "pages", "bytes", "rate", "not done"]]
    for direction in ("loads", "stores"):
        one = part_of(tiers, direction)
        seconds = number_of(one, "num_busy_seconds")
        rate = f"{format_bytes(number_of(one, 'num_bytes') / seconds)}/s" if seconds else "-"
        jobs, pages = (f"{number_of(one, name):.0f}" for name in ("num_started", "num_pages"))
        prefix = "num_dropped_"
        reasons = {name.removeprefix(prefix): count for name, count in one.items() if name.startswith(prefix)}
        rows.append([direction, jobs, pages, format_bytes(number_of(one, "num_bytes")), rate, _reasons(reasons) or "-"])
    misses = f"{number_of(tiers, 'num_misses'):.0f} requests hit nothing"
    late = f"{number_of(tiers, 'num_lookups_late'):.0f} of {number_of(tiers, 'num_lookups'):.0f} lookups came late"
    return [format_columns(rows), f"{misses}; {late}"]


def _expectations(router: Mapping[str, Any]) -> str:
    return (
        f"expected now: prefill {number_of(router, 'prefill_tokens_per_s'):.0f} tok/s, "
        f"decode step {number_of(router, 'decode_step_s') * 1e3:.1f} ms, "
        f"load {format_bytes(number_of(router, 'load_bytes_per_s'))}/s, "
        f"promotion {format_bytes(number_of(router, 'promotion_bytes_per_s'))}/s"
    )


def _reasons(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in numbers_of(counts).items() if count)


def format_pages(pages: Sequence[Mapping[str, Any]]) -> str:
    """One line a page: its name, whose it is, since when it is idle, and its objects."""
    if not pages:
        return "no pages"
    rows = [["page", "parent", "root", "idle", "objects"]]
    for page in pages:
        names = [page[name][:12] for name in ("name", "parent", "root")]
        objects = ", ".join(_describe(each) for each in page["objects"])
        rows.append([*names, f"{page['idle_s']:.1f} s", objects])
    return format_columns(rows)


def _describe(each: Mapping[str, Any]) -> str:
    state = each["durability"] if each["content"] == "ready" else each["content"]
    pins = f", {each['num_pins']} pins" if each["num_pins"] else ""
    return f"{each['group']} {state}{pins}"


def format_flush(dropped: Mapping[str, int]) -> str:
    """What went, by tier."""
    in_use = dropped["device_pages_in_use"]
    later = f" ({in_use} more go when their requests end)" if in_use else ""
    return (
        f"flushed: {dropped['device_pages']} pages of the device{later}, "
        f"{dropped['host_objects']} objects of the host, {dropped['disk_objects']} of the disk"
    )


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
