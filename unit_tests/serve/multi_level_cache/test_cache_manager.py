"""What the manager answers to router, workers, launcher and operators."""

import numpy as np

from serve.ipc.messages import (
    Acquire,
    AcquireReply,
    Claim,
    ClaimReply,
    PageRange,
    Probe,
    ProbeReply,
    Resync,
    SlotsInUse,
)
from serve.multi_level_cache.cache_manager import as_bitmap
from serve.multi_level_cache.control import control_handlers
from serve.multi_level_cache.disabled import DisabledCacheManager
from serve.multi_level_cache.host_arena import manager_of
from serve.multi_level_cache.page_state import DropReason
from serve.types import AcquireOutcome, JobId, JobResult
from unit_tests.serve.multi_level_cache.builders import SLOT_BYTES, Bench, FakeNames, FakePost, request

BOTH = (PageRange("full", 0, 3), PageRange("state", 2, 1))
PROMPT = request(0, "a", "b", "c")


def test_a_probe_reports_raw_presence_by_group():
    bench = Bench()
    bench.store(PROMPT, *BOTH)
    longer = request(0, "a", "b", "c", "d")
    assert bench.present(longer) == [True, True, True, False]
    assert bench.present(longer, "state") == [False, False, True, False]
    assert bench.probe(longer).disk == {"full": b"\0", "state": b"\0"}
    assert bench.host.stats.pages_hit == {"full": 9, "state": 3}


def test_bitmaps_are_little_endian():
    assert as_bitmap([True] + [False] * 7 + [False, True]) == b"\x01\x02"
    assert as_bitmap([]) == b""


def test_messages_of_requests_that_are_gone_get_nothing():
    bench = Bench()
    bench.store(PROMPT)
    bench.manager.handle(Probe(1, 0, 2, 3))
    assert bench.post.take() == []
    bench.manager.handle(Acquire(bench.job(), 0, 2, list(BOTH), 1, 1.0))
    reply = bench.one_reply()
    assert isinstance(reply, AcquireReply)
    assert reply.outcome is AcquireOutcome.STALE
    bench.manager.handle(Claim(bench.job(), 0, 2, list(BOTH), 1, 1.0))
    reply = bench.one_reply()
    assert isinstance(reply, ClaimReply)
    assert (reply.granted, reply.num_refused) == ([], 4)


def test_an_acquire_pins_all_or_names_what_is_missing():
    bench = Bench()
    stored = bench.store(PROMPT, *BOTH)
    reply = bench.acquire(PROMPT, *BOTH)
    by_group = {group: [slots for name, _, slots, _ in stored.granted if name == group] for group in ("full", "state")}
    assert reply.slots == [[slots[0] for slots in by_group["full"]], by_group["state"][0]]
    assert [len(each) for each in reply.generations] == [3, 3]
    missing = bench.acquire(request(0, "a", "b", "x", "y"), PageRange("full", 0, 4), PageRange("state", 3, 1))
    assert missing.missing == [PageRange("full", 2, 2), PageRange("state", 3, 1)]
    assert bench.host.directory.slots_pinned == 6, "the refused acquire pins nothing"
    bench.begin(reply.job)
    bench.answer(reply.job)
    bench.assert_idle()


def test_loads_pin_less_than_half_of_the_arena():
    bench = Bench(20)
    prompt = request(0, *range(12))
    bench.store(prompt)
    assert bench.acquire(prompt, PageRange("full", 0, 10)).outcome is AcquireOutcome.BUSY
    first = bench.acquire(prompt, PageRange("full", 0, 9))
    assert first.outcome is AcquireOutcome.GRANTED
    assert bench.acquire(prompt, PageRange("full", 0, 9)).outcome is AcquireOutcome.GRANTED, "pinned already"
    assert bench.acquire(prompt, PageRange("full", 9, 1)).outcome is AcquireOutcome.BUSY


def test_the_objects_of_a_boundary_are_granted_together_or_not_at_all():
    bench = Bench(8)
    atomic = bench.claim(PROMPT, PageRange("full", 0, 3), PageRange("state", 0, 3), atomic=True)
    assert (atomic.granted, atomic.num_refused) == ([], 6)
    reply = bench.claim(PROMPT, PageRange("full", 0, 3), PageRange("state", 0, 3))
    assert [(group, page) for group, page, _, _ in reply.granted] == [("full", 0), ("state", 0)]


def test_one_rank_that_fails_empties_all_pages_of_the_job():
    bench = Bench()
    reply = bench.claim(PROMPT, *BOTH, ranks=2)
    bench.begin(reply.job)
    bench.answer(reply.job, 0, JobResult.DONE)
    bench.answer(reply.job, 1, JobResult.DROPPED)
    assert not any(bench.present(PROMPT))
    bench.assert_idle()


def test_bytes_that_do_not_match_their_checksum_are_dropped_when_nobody_reads_them():
    bench = Bench()
    stored = bench.store(PROMPT)
    first, second = bench.acquire(PROMPT), bench.acquire(PROMPT)
    bench.begin(first.job)
    bench.answer(first.job, 0, JobResult.FAILED, bad_slots=[stored.granted[1][2][0]])
    assert bench.present(PROMPT) == [True, False, True]
    assert bench.host.directory.slots_pinned == 3
    bench.begin(second.job)
    bench.answer(second.job, 0)
    bench.assert_idle()
    assert bench.host.stats.drops == {DropReason.CHECKSUM.value: 1}
    assert bench.host.stats.as_data()["checksum_failures"] == 1


def test_claims_may_bring_their_own_names():
    bench = Bench()
    names = b"".join([*PROMPT.names, PROMPT.names[2]])
    parents = PROMPT.root + PROMPT.names[1]
    reply = bench.claim(request(9, "z"), *BOTH, names=names, parents=parents, root=PROMPT.root)
    bench.finish_store(reply)
    assert bench.present(PROMPT) == [True] * 3
    assert bench.present(PROMPT, "state") == [False, False, True]
    node = bench.host.directory.node(PROMPT.names[2])
    assert node is not None
    assert (node.parent, node.root) == (PROMPT.names[1], PROMPT.root)


def test_malformed_messages_are_refused_and_counted():
    bench = Bench()
    assert bench.claim(PROMPT, PageRange("full", 2, 5)).num_refused == 5
    assert bench.claim(PROMPT, PageRange("other", 0, 1)).num_refused == 1
    assert bench.claim(PROMPT, PageRange("full", 0, 1), ranks=0).num_refused == 1
    assert bench.claim(PROMPT, PageRange("full", 0, 1), names=b"short", root=PROMPT.root).num_refused == 1
    assert bench.acquire(PROMPT, PageRange("full", -1, 2)).outcome is AcquireOutcome.MISSING
    bench.manager.handle(Resync(1))
    assert bench.host.stats.events == {"malformed": 5, "unknown_message": 1}


def test_a_flush_by_root_leaves_other_roots_and_waits_for_pins():
    bench = Bench()
    mine, other = request("mine", "a", "b"), request("other", "a")
    bench.store(mine)
    bench.store(other)
    lease = bench.acquire(mine)
    filling = request("mine", "a", "b", "c")
    claim = bench.claim(filling)
    handlers = control_handlers(bench.manager)
    assert handlers["flush"](root=mine.root.hex()) == {"dropped": 3, "lower_dropped": 0, "leaving": 0}
    assert (bench.present(mine), bench.present(other)) == ([False, False], [True])
    bench.assert_sound()
    assert bench.host.directory.slots_pinned == 2
    again = bench.store(mine)
    assert len(again.granted) == 2, "a new copy may come before the old one has gone"
    bench.finish_store(claim)
    assert bench.present(filling) == [True, True, False]
    bench.begin(lease.job)
    bench.answer(lease.job)
    bench.assert_idle()
    assert handlers["flush"]() == {"dropped": 3, "lower_dropped": 0, "leaving": 0}
    assert bench.host.pool.num_free == 64


def test_generations_grow_before_each_reuse():
    bench = Bench(4)
    first = bench.store(request(0, "a"))
    bench.manager.flush()
    second = bench.store(request(1, "a"))
    (_, _, slots, old), (_, _, same, new) = first.granted[0], second.granted[0]
    assert slots == same
    assert new > old
    assert bench.arena.name[slots[0]].tobytes() == request(1, "a").names[0]


def test_a_restarted_manager_waits_for_all_workers_and_keeps_off_their_slots():
    old = Bench(16)
    running = old.claim(request(0, *range(4)), ranks=2)
    old.begin(running.job)
    used = [slot for _, _, slots, _ in running.granted for slot in slots]
    bench = Bench(arena=old.arena)
    bench._counter = 100
    bench.manager.engine_up(1, 2)
    assert [(rank, type(message)) for _, rank, message in bench.post.workers] == [(0, Resync), (1, Resync)]
    nonce = bench.manager.resync.nonce
    prompt = request(1, *range(16))
    bench.manager.handle(SlotsInUse(nonce, 0, [running.job], used))
    bench.manager.handle(SlotsInUse(nonce - 1, 1, [], []))
    assert bench.claim(prompt).granted == []
    assert bench.acquire(prompt).outcome is AcquireOutcome.BUSY
    bench.manager.handle(SlotsInUse(nonce, 1, [], []))
    reply = bench.claim(prompt)
    given = [
        (slot, manager_of(number))
        for _, _, slots, numbers in reply.granted
        for slot, number in zip(slots, numbers, strict=True)
    ]
    assert not {slot for slot, _ in given} & set(used)
    assert {number for _, number in given} == {nonce}
    bench.release(reply.job)
    bench.answer(running.job, 0)
    bench.assert_idle()
    assert len(bench.claim(prompt).granted) == 15


def test_the_death_of_the_engine_ends_the_wait_of_a_restarted_manager():
    bench = Bench(arena=Bench(16).arena)
    bench.manager.engine_up(1, 2)
    bench.manager.engine_down(1)
    assert len(bench.claim(request(0, "a"), job=bench.job(epoch=2)).granted) == 1


def test_the_control_plane_tells_what_is_there():
    bench = Bench()
    bench.store(PROMPT, *BOTH)
    handlers = control_handlers(bench.manager)
    statistics = handlers["statistics"]()
    assert statistics["objects"] == {
        "content": {"ready": 4},
        "durability": {"volatile": 4},
        "bytes": {"full": 3 * SLOT_BYTES, "state": 10000},
        "tokens": {"full": 192, "state": 64},
    }
    assert statistics["slots"] == {"total": 64, "backed": 64, "free": 58, "blocked": 0, "filling": 0, "pinned": 0}
    listed = handlers["ls"](limit=2, root=PROMPT.root.hex())
    assert len(listed) == 2
    assert handlers["check"]() == []
    assert handlers["status"]()["is_ready"]


def test_check_finds_a_header_that_was_overwritten():
    bench = Bench()
    bench.store(PROMPT)
    bench.arena.generation[:] += np.uint64(1)
    assert len(bench.manager.check_integrity()) == 3


def test_without_a_cache_everything_is_a_miss():
    names, post = FakeNames(), FakePost()
    names.put(0, PROMPT)
    manager = DisabledCacheManager(names, post)
    manager.groups = ["full"]
    manager.engine_up(1, 1)
    manager.handle(Probe(1, 0, 1, 3))
    manager.handle(Acquire(JobId(1, 1), 0, 1, list(BOTH), 1, 1.0))
    manager.handle(Claim(JobId(1, 2), 0, 1, list(BOTH), 1, 1.0))
    assert post.take() == [
        ProbeReply(1, {"full": b"\0"}, {"full": b"\0"}),
        AcquireReply(JobId(1, 1), AcquireOutcome.MISSING, missing=list(BOTH)),
        ClaimReply(JobId(1, 2), [], num_refused=4),
    ]
    assert manager.control_handlers()["check"]() == []
