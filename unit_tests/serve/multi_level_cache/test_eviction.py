"""Eviction: LRU, leaves first, exactly the slots wanted or none."""

import random
from collections import OrderedDict

import pytest

from serve.ipc.messages import PageRange
from serve.multi_level_cache.page_state import DropReason
from serve.types import AcquireOutcome
from unit_tests.serve.multi_level_cache.builders import Bench, request


def test_the_least_recently_used_page_goes_first():
    bench = Bench(20)
    prompts = [request(index, "a") for index in range(20)]
    for prompt in prompts[:19]:
        bench.store(prompt)
        bench.clock.now += 1
    bench.probe(prompts[0])
    bench.store(prompts[19])
    bench.store(request("more", "a"))
    assert [bench.present(prompts[index]) for index in (0, 1, 2)] == [[True], [False], [True]]
    bench.assert_idle()


def test_a_page_goes_after_all_that_continue_it():
    bench = Bench(20)
    chain = request("chain", *range(10))
    bench.store(chain)
    bench.clock.now += 100
    for index in range(10):
        bench.store(request(index, "a"))
    for index in range(4):  # each takes one slot more than is free
        bench.store(request("new", index))
        there = [bench.host.directory.node(name) is not None for name in chain.names]
        assert there == [True] * (9 - index) + [False] * (1 + index)
        bench.host.directory.touch([request(each, "a").names[0] for each in range(10)])
    bench.assert_idle()


def test_objects_of_one_page_go_together():
    bench = Bench(20)
    old = request("old", "a")
    bench.store(old, PageRange("full", 0, 1), PageRange("state", 0, 1))
    bench.store(request("fill", *range(16)))
    bench.store(request("new", "a"))
    assert bench.present(old, "full") == bench.present(old, "state") == [False]


def test_nothing_is_evicted_when_room_is_out_of_reach():
    bench = Bench(10)
    held, free = request("held", *range(4)), request("free", *range(5))
    bench.store(held)
    assert bench.acquire(held).outcome is AcquireOutcome.GRANTED
    bench.store(free)
    assert not bench.host.directory.make_room(7)
    assert sum(bench.present(free)) == 5
    assert bench.host.directory.make_room(6)
    assert sum(bench.present(free)) == 0


def test_a_prompt_longer_than_the_arena_keeps_its_first_pages():
    bench = Bench(20)
    long = request("long", *range(40))
    for _ in range(3):
        bench.store(long)
    assert bench.present(long) == [True] * 20 + [False] * 20


def test_five_percent_of_the_slots_stay_evictable_or_free():
    bench = Bench(100)
    reply = bench.claim(request("long", *range(100)))
    assert (len(reply.granted), reply.num_refused) == (95, 5)


def test_evictions_are_counted_by_age():
    bench = Bench(4)
    bench.store(request("old", *range(3)))
    bench.clock.now += 70
    bench.store(request("new", *range(3)))
    data = bench.host.stats.as_data()
    assert data["drops"] == {DropReason.EVICTED.value: 2}
    assert data["eviction_ages"]["sum"] == 140
    assert sum(data["eviction_ages"]["counts"]) == 2


def test_pages_that_were_flushed_leave_the_queue_of_leaves():
    bench = Bench(200)
    leaves = bench.host.directory._leaves
    for turn in range(20):
        for index in range(50):
            bench.store(request((turn, index), "a"))
        assert len(leaves) <= 2 * 50 + 1
        bench.manager.flush()
    for index in range(300):
        bench.store(request(index, "a"))
    assert [bench.present(request(index, "a")) for index in (99, 100, 299)] == [[False], [True], [True]]
    bench.assert_idle()


def lru_hits(sequence: list[int], size: int) -> int:
    """Hits of a textbook LRU."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for item in sequence:
        if item in cache:
            hits += 1
            cache.move_to_end(item)
            continue
        if len(cache) == size:
            cache.popitem(last=False)
        cache[item] = None
    return hits


def zipf(count: int, length: int) -> list[int]:
    weights = [1 / (rank + 1) for rank in range(count)]
    return random.Random(7).choices(range(count), weights, k=length)


@pytest.mark.parametrize(
    "sequence", [[index % 60 for index in range(600)], [index % 30 for index in range(300)], zipf(200, 3000)]
)
def test_hit_rates_are_those_of_an_exact_lru(sequence: list[int]):
    bench, hits = Bench(41), 0
    for item in sequence:
        prompt = request(item, "a")
        hits += bench.present(prompt) == [True]
        bench.store(prompt)
    assert hits == lru_hits(sequence, 41)
    bench.assert_idle()


def test_the_next_victims_are_known_before_they_go_with_the_pages_above_them():
    bench = Bench(20)
    old, new = request("old", *range(5)), request("new", *range(15))
    bench.store(old)
    bench.store(new)
    bench.host.directory.touch(old.names[:2])
    bench.host.directory.touch(new.names)
    directory = bench.host.directory
    assert [node.name for node in directory.next_victims(4)][:3] == old.names[:1:-1]
    assert {node.name for node in directory.next_victims(100)} == {*old.names[2:], *new.names}
    bench.store(request("more", *range(3)))
    assert [directory.node(name) is not None for name in old.names] == [True, True, False, False, False]
    assert directory.next_victims(1)[0].name == old.names[1]
    bench.assert_idle()
