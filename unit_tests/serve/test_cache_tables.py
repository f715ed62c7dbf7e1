from serve.cache_operations import stats
from serve.cache_tables import format_columns, format_flush, format_pages, format_stats
from unit_tests.serve.test_cache_operations import GONE, Processes
from unit_tests.serve.test_cache_report import CACHE, ROUTER


def test_statistics_are_a_line_a_tier_and_then_reasons() -> None:
    loads = {"num_started": 2, "num_bytes": 2**21, "num_busy_seconds": 2.0, "num_pages": 4, "num_dropped_late": 3}
    router = {**ROUTER, "tiers": {**ROUTER["tiers"], "loads": loads, "num_misses": 6}, "decode_step_s": 0.02}
    off = {**CACHE, "lower_tier": {**CACHE["lower_tier"], "off_reason": "2 reads or writes hang"}}
    text = format_stats(stats(Processes(router_statistics=router, cache_statistics=off)))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "host 32.0 KiB 24.0 KiB 1 filling, 2 volatile, 3 durable 2 64 4 1" in lines
    assert "disk is off: 2 reads or writes hang" in lines
    assert "loads 2 4 2.0 MiB 1.0 MiB/s late 3" in lines
    assert "6 requests hit nothing; 0 of 0 lookups came late" in lines
    assert "left the host: evicted 4" in lines
    assert "decode step 20.0 ms" in text


def test_who_is_away_is_told() -> None:
    text = format_stats(stats(Processes(router_statistics=ROUTER, cache_statistics=GONE)))
    assert f"cache is away: {GONE}" in text


def test_pages_and_flushes_are_readable() -> None:
    objects = [
        {"group": "full", "content": "ready", "durability": "durable", "num_pins": 1, "slots": [3]},
        {"group": "tail", "content": "filling", "durability": "volatile", "num_pins": 0, "slots": [4]},
    ]
    page = {"name": "a" * 64, "parent": "b" * 64, "root": "c" * 64, "idle_s": 1.25, "objects": objects}
    assert format_pages([]) == "no pages"
    assert format_pages([page]).splitlines()[1] == (
        f"{'a' * 12}  {'b' * 12}  {'c' * 12}  1.2 s  full durable, 1 pins, tail filling"
    )
    dropped = {"device_pages": 1, "device_pages_in_use": 2, "host_objects": 3, "disk_objects": 4}
    assert format_flush(dropped) == (
        "flushed: 1 pages of the device (2 more go when their requests end), 3 objects of the host, 4 of the disk"
    )


def test_columns_are_aligned() -> None:
    assert format_columns([["a", "b"], ["ccc", ""]]) == "a    b\nccc"
