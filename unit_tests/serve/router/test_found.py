"""Sets of page numbers from bitmaps, and back to ranges."""

import numpy as np

from serve.ipc.messages import PageRange, ProbeReply
from serve.multi_level_cache.cache_manager import as_bitmap
from serve.router.found import Found, mask_of, members, ranges_of


def test_the_managers_bitmaps_become_sets():
    present = [bool(bit) for bit in np.random.default_rng(0).integers(0, 2, 100)]
    found = Found.of(ProbeReply(1, {"full": as_bitmap(present)}, {"full": as_bitmap([False] * 100)}))
    assert list(members(found.host["full"])) == [number for number, there in enumerate(present) if there]
    assert found.disk["full"] == 0
    assert found.anywhere("full") == found.host["full"]
    assert found.anywhere("other") == 0


def test_nothing_found_is_empty():
    assert Found.of(ProbeReply(1, {"full": b"\0\0"}, {})).is_empty
    assert not Found.of(ProbeReply(1, {"full": b"\0"}, {"full": b"\1"})).is_empty


def test_lost_ranges_are_lost_in_every_tier():
    found = Found({"full": 0b1111, "index": 0b1111}, {"full": 0b111100})
    found.lose([PageRange("full", 2, 3), PageRange("unknown", 0, 1)])
    assert (found.host["full"], found.host["index"], found.disk["full"]) == (0b0011, 0b1111, 0b100000)


def test_ranges_are_the_fewest():
    assert ranges_of("g", [0, 1, 2, 5, 7, 8]) == [PageRange("g", 0, 3), PageRange("g", 5, 1), PageRange("g", 7, 2)]
    assert ranges_of("g", []) == []
    assert list(members(mask_of(3, 2))) == [3, 4]
