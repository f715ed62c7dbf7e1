"""The cache's tiers in one form, out of what the router and the cache manager each tell of themselves.

Statistics come from other processes, maybe of another moment or not at all: whatever is missing counts as nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Data = Mapping[str, Any]


@dataclass(frozen=True)
class TierReport:
    """One tier now, and since its start.

    pages: by state; on the device by page, below by object (one a page and state group). Bytes are None where nobody
    knows. hit_requests, hit_tokens: of requests at their first admission, and prompt tokens not computed.
    """

    tier: str
    pages: dict[str, int]
    total_bytes: int | None = None
    used_bytes: int | None = None
    hit_requests: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    checksum_failures: int = 0
    off_reason: str | None = None
    eviction_ages: dict[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def part_of(data: Any, *path: str) -> Data:
    """The dict at a path of nested dicts; empty where there is none."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def number_of(data: Data, name: str) -> float:
    """A number of a dict; 0 where there is none."""
    value = data.get(name)
    return value if isinstance(value, (int, float)) else 0


def numbers_of(data: Data) -> dict[str, float]:
    """The numbers of a dict."""
    return {str(name): value for name, value in data.items() if isinstance(value, (int, float))}


def tier_reports(router: Data, cache: Data) -> list[TierReport]:
    """Reports of the tiers that there are. router, cache: their `statistics`, or empty."""
    reports = [_device(router)] if router else []
    if part_of(cache, "slots"):
        reports.append(_host(router, cache))
    if part_of(cache, "lower_tier"):
        reports.append(_disk(router, part_of(cache, "lower_tier")))
    return reports


def _hit_requests(router: Data, tier: str) -> int:
    return int(number_of(part_of(router, "tiers"), f"num_hits_{tier}"))


def _hit_tokens(router: Data, tier: str) -> int:
    return int(number_of(part_of(router, "cached_tokens"), tier))


def _device(router: Data) -> TierReport:
    groups = [part_of(group) for group in part_of(router, "pages").values()]
    states = {name: int(sum(number_of(group, name) for group in groups)) for name in ("free", "used", "cached")}
    total = sum(number_of(group, "total") * number_of(group, "page_bytes") for group in groups)
    used = sum((number_of(g, "used") + number_of(g, "cached")) * number_of(g, "page_bytes") for g in groups)
    return TierReport(
        "device",
        states,
        total_bytes=int(total) or None,
        used_bytes=int(used) if total else None,
        evicted_pages=int(sum(number_of(group, "evicted") for group in groups)),
        hit_requests=_hit_requests(router, "device"),
        hit_tokens=_hit_tokens(router, "device"),
    )


def _host(router: Data, cache: Data) -> TierReport:
    slots, objects = part_of(cache, "slots"), part_of(cache, "objects")
    durability = part_of(objects, "durability")
    pages = {"filling": int(number_of(part_of(objects, "content"), "filling"))}
    pages |= {name: int(number_of(durability, name)) for name in ("volatile", "persisting", "durable")}
    slot_bytes = number_of(cache, "slot_bytes")
    return TierReport(
        "host",
        pages,
        total_bytes=int(number_of(slots, "backed") * slot_bytes),
        used_bytes=int((number_of(slots, "backed") - number_of(slots, "free")) * slot_bytes),
        evicted_pages=int(number_of(part_of(cache, "drops"), "evicted")),
        checksum_failures=int(number_of(cache, "checksum_failures")),
        eviction_ages=dict(part_of(cache, "eviction_ages")),
        hit_requests=_hit_requests(router, "host"),
        hit_tokens=_hit_tokens(router, "host"),
    )


def _disk(router: Data, disk: Data) -> TierReport:
    off_reason = disk.get("off_reason")
    return TierReport(
        "disk",
        {"stored": int(number_of(disk, "num_objects")), "leaving": int(number_of(disk, "leaving"))},
        total_bytes=int(number_of(disk, "total_bytes")),
        used_bytes=int(number_of(disk, "objects_bytes")),
        evicted_pages=int(number_of(disk, "evicted")),
        checksum_failures=int(number_of(disk, "loads_corrupt") + number_of(disk, "stores_corrupt")),
        off_reason=off_reason if isinstance(off_reason, str) else None,
        eviction_ages=dict(part_of(disk, "eviction_ages")),
        hit_requests=_hit_requests(router, "disk"),
        hit_tokens=_hit_tokens(router, "disk"),
    )
