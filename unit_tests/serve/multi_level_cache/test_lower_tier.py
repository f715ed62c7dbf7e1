"""Promotions, persistence and faults, with a secondary tier in a dict."""

import numpy as np
import pytest

from serve.ipc.messages import AcquireReply, PageRange
from serve.multi_level_cache.fault_injector import FaultInjector, parse_faults
from serve.multi_level_cache.faulty_tier import FaultyTier
from serve.multi_level_cache.page_state import PageKey
from serve.multi_level_cache.request_names import RequestNames
from serve.multi_level_cache.secondary_tier import TransferOutcome
from serve.multi_level_cache.statistics import TransferSpeed
from serve.types import AcquireOutcome, Durability
from unit_tests.serve.multi_level_cache.builders import Bench, FakeClock, request
from unit_tests.serve.multi_level_cache.fake_tier import FakeTier

BOTH = (PageRange("full", 0, 2), PageRange("state", 1, 1))
PROMPT = request(0, "a", "b")


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def bench(tier: FakeTier) -> Bench:
    return Bench(64, tier)


def persist(bench: Bench, tier: FakeTier, prompt: RequestNames = PROMPT) -> None:
    """The prompt is in the tier, and no more in the host."""
    reply = bench.claim(prompt, PageRange("full", 0, len(prompt.names)), PageRange("state", len(prompt.names) - 1, 1))
    for position, (_, _, slots, _) in enumerate(reply.granted):
        bench.arena.payload[slots] = position + 1
        bench.arena.checksum[slots[0]] = position + 1
    bench.finish_store(reply)
    for _ in range(10):
        bench.manager.tick()
        tier.finish()
    kept = dict(tier.objects)
    bench.manager.tick()
    bench.manager.flush()
    tier.objects = kept


def reply_of(bench: Bench) -> AcquireReply:
    reply = bench.one_reply()
    assert isinstance(reply, AcquireReply)
    return reply


def test_ready_pages_become_durable_and_a_dropped_object_volatile_again(bench: Bench, tier: FakeTier):
    bench.store(PROMPT)
    bench.manager.tick()
    assert len(tier.stores) == 2
    page = bench.host.directory.find_ready(PageKey(PROMPT.names[0], "full"))
    assert page is not None
    assert (page.durability, len(page.pins)) == (Durability.PERSISTING, 1)
    tier.finish()
    bench.manager.tick()
    assert page.durability is Durability.DURABLE
    tier.evicted.append(page.key)
    bench.manager.tick()
    assert page.durability is Durability.VOLATILE
    bench.assert_idle()


@pytest.mark.parametrize("outcome", [TransferOutcome.FAILED, TransferOutcome.REFUSED])
def test_what_cannot_be_stored_stays_a_candidate(bench: Bench, tier: FakeTier, outcome: TransferOutcome):
    bench.store(PROMPT)
    bench.manager.tick()
    tier.finish(outcome)
    bench.manager.tick()
    bench.assert_idle()
    assert tier.stores == [], "not tried again at once"
    bench.store(PROMPT)
    bench.manager.tick()
    assert len(tier.stores) == 2


def test_a_tier_that_accepts_nothing_is_left_alone(bench: Bench, tier: FakeTier):
    tier.is_open = False
    bench.store(PROMPT)
    bench.advance(1.0)
    assert tier.stores == []
    assert bench.present(PROMPT) == [True, True]


def test_bytes_found_corrupt_while_storing_are_dropped(bench: Bench, tier: FakeTier):
    bench.store(PROMPT)
    bench.manager.tick()
    tier.finish(TransferOutcome.CORRUPT)
    bench.manager.tick()
    assert bench.present(PROMPT) == [False, False]
    bench.assert_idle()


def test_an_acquire_promotes_first_and_answers_when_all_is_there(bench: Bench, tier: FakeTier):
    persist(bench, tier)
    assert bench.present(PROMPT, "state", "disk") == [False, True]
    bench.acquire_later(PROMPT, *BOTH)
    assert bench.post.take() == []
    bench.assert_sound()
    tier.finish()
    bench.manager.tick()
    reply = reply_of(bench)
    assert (reply.outcome, reply.promoted) == (AcquireOutcome.GRANTED, 3)
    assert {page.durability for page in bench.host.directory.pages()} == {Durability.DURABLE}
    assert tier.stores == [], "what came from the tier is not stored again"
    assert (bench.arena.payload[reply.slots[0][1]] == 2).all()
    assert bench.arena.checksum[reply.slots[1][0], 0] == 3
    assert (bench.arena.payload[reply.slots[1][2], : 10000 - 8192] == 3).all()
    bench.begin(reply.job)
    bench.answer(reply.job)
    bench.assert_idle()


def test_two_jobs_share_one_read(bench: Bench, tier: FakeTier):
    persist(bench, tier)
    bench.acquire_later(PROMPT, *BOTH)
    bench.acquire_later(PROMPT, *BOTH)
    assert len(tier.loads) == 3
    tier.finish()
    bench.manager.tick()
    replies = [reply for reply in bench.post.take() if isinstance(reply, AcquireReply)]
    assert [reply.outcome for reply in replies] == [AcquireOutcome.GRANTED] * 2
    assert replies[0].slots == replies[1].slots


@pytest.mark.parametrize("outcome", [TransferOutcome.FAILED, TransferOutcome.CORRUPT, TransferOutcome.MISSING])
def test_a_read_that_fails_is_a_miss_for_all_who_wait(bench: Bench, tier: FakeTier, outcome: TransferOutcome):
    persist(bench, tier)
    bench.acquire_later(PROMPT, *BOTH)
    bench.acquire_later(PROMPT, *BOTH)
    tier.finish(outcome)
    bench.manager.tick()
    replies = [reply for reply in bench.post.take() if isinstance(reply, AcquireReply)]
    assert [reply.outcome for reply in replies] == [AcquireOutcome.MISSING] * 2
    assert all(reply.missing for reply in replies)
    bench.assert_idle()


def test_a_read_that_hangs_costs_the_waiter_its_deadline_and_nothing_else(bench: Bench, tier: FakeTier):
    persist(bench, tier)
    bench.acquire_later(PROMPT, *BOTH)
    bench.advance(11)
    assert reply_of(bench).outcome is AcquireOutcome.BUSY
    assert len(bench.host.leases) == 0
    bench.assert_sound()
    assert bench.host.directory.slots_filling == 5, "the read still writes into its slots"
    tier.finish()
    bench.manager.tick()
    assert bench.present(PROMPT) == [True, True]
    bench.assert_idle()


def test_what_was_flushed_while_it_was_read_is_not_used(bench: Bench, tier: FakeTier):
    persist(bench, tier)
    bench.acquire_later(PROMPT, *BOTH)
    kept = dict(tier.objects)
    bench.manager.flush()
    tier.objects = kept
    tier.finish()
    bench.manager.tick()
    assert reply_of(bench).outcome is AcquireOutcome.MISSING
    bench.assert_idle()


def test_promotions_count_towards_the_held_half(tier: FakeTier):
    bench = Bench(20, tier)
    prompt = request(0, *range(12))
    persist(bench, tier, prompt)
    bench.acquire_later(prompt, PageRange("full", 0, 6))
    assert bench.post.take() == []
    assert bench.acquire(prompt, PageRange("full", 6, 4)).outcome is AcquireOutcome.BUSY
    bench.manager.engine_down(1)
    tier.finish()
    bench.manager.tick()
    bench.assert_idle()


def test_injected_faults_keep_the_contract(tier: FakeTier):
    rules = parse_faults("disk.read:fail:n=1,disk.read:bitflip:n=4,disk.read:hang:n=7,disk.write:drop:n=1")
    faulty = FaultyTier(tier, FaultInjector(rules))
    bench = Bench(64, faulty)
    bench.store(PROMPT)
    bench.manager.tick()
    tier.finish()
    bench.manager.tick()
    assert len(tier.objects) == 1, "the first write was dropped"
    persist(bench, tier)
    outcomes = []
    for _ in range(2):
        bench.acquire_later(PROMPT, *BOTH)
        tier.finish()
        bench.manager.tick()
        reply = reply_of(bench)
        outcomes.append(reply.outcome)
        if reply.outcome is AcquireOutcome.GRANTED:
            first = bench.arena.payload[reply.slots[0][0]]
            assert np.unpackbits(first).sum() == 1
            bench.release(reply.job)
        kept = dict(tier.objects)
        bench.manager.tick()
        bench.manager.flush()
        tier.objects = kept
    assert outcomes == [AcquireOutcome.MISSING, AcquireOutcome.GRANTED]
    bench.acquire_later(PROMPT, *BOTH)
    tier.finish()
    bench.manager.tick()
    assert bench.post.take() == []
    faulty.release()
    bench.manager.tick()
    assert reply_of(bench).outcome is AcquireOutcome.GRANTED


def test_a_speed_falls_while_a_transfer_hangs_and_soon_forgets_it() -> None:
    clock = FakeClock()
    speed = TransferSpeed(clock)
    assert speed.bytes_per_s() == 0.0
    for _ in range(2):
        speed.begin(1000)
    assert speed.bytes_per_s() == 0.0, "nothing is known yet"
    clock.now += 0.5
    speed.end(1000)
    assert speed.bytes_per_s() == 4000, "should the other one end now"
    clock.now += 0.5
    speed.end(1000)
    assert speed.bytes_per_s() == 2000
    clock.now += 1000
    assert speed.bytes_per_s() == 2000, "idle time is no measurement"
    speed.begin(1000)
    clock.now += 100
    assert speed.bytes_per_s() == 10
    speed.end(1000)
    for _ in range(4):
        speed.begin(1000)
        clock.now += 0.5
        speed.end(1000)
    assert 1000 < speed.bytes_per_s() < 2000


def test_an_idle_tier_is_tried_with_one_page_that_was_looked_up(bench: Bench, tier: FakeTier) -> None:
    persist(bench, tier)
    bench.clock.now += 10
    bench.present(PROMPT)
    bench.manager.tick()
    assert tier.loads == [], "whoever looked it up may be about to load it"
    bench.advance(1)
    (load,) = tier.loads
    assert load.key.name in PROMPT.names
    bench.present(PROMPT)
    bench.advance(0.5)
    assert len(tier.loads) == 1, "one at a time"
    tier.finish()
    bench.manager.tick()
    bench.assert_sound()
    bench.present(PROMPT)
    bench.advance(1)
    assert tier.loads == [], "it is not idle"
    reply = bench.probe(PROMPT)
    assert reply.disk_bytes_per_s == pytest.approx(2 * load.form.object_bytes, rel=0.01)


def test_reads_that_fail_at_once_say_nothing_of_the_speed() -> None:
    clock = FakeClock()
    speed = TransferSpeed(clock)
    for num_bytes in (1000, 0):
        speed.begin(1000)
        clock.now += 0.5
        speed.end(num_bytes)
    assert speed.bytes_per_s() == 2000
    speed.begin(1000)
    clock.now += 10
    speed.end(0)
    assert speed.bytes_per_s() < 100, "one that fails late has shown that the tier is slow"


def test_damaged_pages_leave_the_speed_of_the_tier_as_it_is(bench: Bench, tier: FakeTier) -> None:
    persist(bench, tier)
    bench.acquire_later(PROMPT, *BOTH)
    num_bytes = sum(load.form.object_bytes for load in tier.loads)
    bench.clock.now += 0.5
    tier.finish(TransferOutcome.CORRUPT)
    bench.manager.tick()
    assert reply_of(bench).outcome is AcquireOutcome.MISSING
    assert bench.probe(PROMPT).disk_bytes_per_s == pytest.approx(2 * num_bytes, rel=0.01)


def test_lookups_that_follow_each_other_closely_do_not_put_the_probe_off(bench: Bench, tier: FakeTier) -> None:
    persist(bench, tier)
    bench.clock.now += 10
    for _ in range(20):
        bench.present(PROMPT)
        bench.clock.now += 0.1
        bench.manager.tick()
    assert len(tier.loads) == 1
    tier.finish()
    bench.manager.tick()
    bench.assert_sound()
