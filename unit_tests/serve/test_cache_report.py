from typing import Any

import pytest

from serve.cache_report import number_of, part_of, tier_reports

ROUTER: dict[str, Any] = {
    "tiers": {"num_hits_device": 3, "num_hits_host": 2, "num_hits_disk": 1},
    "cached_tokens": {"device": 96, "host": 64, "disk": 32},
    "pages": {"full": {"total": 10, "free": 4, "used": 1, "cached": 5, "evicted": 7, "page_bytes": 100}},
}
CACHE: dict[str, Any] = {
    "slot_bytes": 4096,
    "slots": {"total": 8, "backed": 8, "free": 2},
    "objects": {"content": {"ready": 5, "filling": 1}, "durability": {"volatile": 2, "durable": 3}},
    "drops": {"evicted": 4},
    "checksum_failures": 1,
    "lower_tier": {"num_objects": 9, "total_bytes": 1000, "objects_bytes": 900, "evicted": 2, "loads_corrupt": 1},
}


def test_every_tier_has_its_numbers() -> None:
    device, host, disk = tier_reports(ROUTER, CACHE)
    assert (device.tier, device.pages) == ("device", {"free": 4, "used": 1, "cached": 5})
    assert (device.total_bytes, device.used_bytes, device.evicted_pages) == (1000, 600, 7)
    assert host.pages == {"filling": 1, "volatile": 2, "persisting": 0, "durable": 3}
    assert (host.total_bytes, host.used_bytes, host.evicted_pages, host.checksum_failures) == (32768, 24576, 4, 1)
    assert (disk.pages, disk.total_bytes, disk.used_bytes) == ({"stored": 9, "leaving": 0}, 1000, 900)
    assert (disk.evicted_pages, disk.checksum_failures, disk.off_reason) == (2, 1, None)
    assert [each.hit_requests for each in (device, host, disk)] == [3, 2, 1]
    assert [each.hit_tokens for each in (device, host, disk)] == [96, 64, 32]


@pytest.mark.parametrize(
    ("router", "cache", "tiers"),
    [
        ({}, {}, []),
        (ROUTER, {}, ["device"]),
        ({}, CACHE, ["host", "disk"]),
        (ROUTER, {"num_probes": 3}, ["device"]),
        (ROUTER, {"slots": {"total": 1}}, ["device", "host"]),
    ],
)
def test_who_is_away_or_off_is_left_out(router: dict[str, Any], cache: dict[str, Any], tiers: list[str]) -> None:
    assert [report.tier for report in tier_reports(router, cache)] == tiers


def test_nonsense_counts_as_nothing() -> None:
    assert part_of({"a": {"b": 3}}, "a", "b") == {}
    assert part_of(None, "a") == {}
    assert number_of({"a": "many"}, "a") == 0
    assert tier_reports({"pages": [1], "tiers": 4} | {"pages": {"full": 3}}, {})[0].pages["free"] == 0
