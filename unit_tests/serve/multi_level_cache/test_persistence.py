"""Which pages go down to a secondary tier, when, and what keeps them out."""

from dataclasses import replace

import pytest

from serve.ipc.messages import PageRange
from serve.multi_level_cache.page_state import PageKey, PageUse, PageUser, Withheld
from serve.multi_level_cache.persist_policy import PersistPolicy, PersistRules
from serve.multi_level_cache.request_names import RequestNames
from serve.multi_level_cache.secondary_tier import TransferOutcome
from serve.types import AcquireOutcome
from unit_tests.serve.multi_level_cache.builders import Bench, request
from unit_tests.serve.multi_level_cache.fake_tier import FakeTier

AFTER_HITS = PersistRules(PersistPolicy.AFTER_HITS)
LONG_ONLY = PersistRules(min_tokens=100)
PROMPT = request(0, "a", "b")
OWNER = PageUser(3, 7, 120)


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


def bench_of(tier: FakeTier, rules: PersistRules, num_slots: int = 64) -> Bench:
    return Bench(num_slots, tier, rules=rules)


def settle(bench: Bench, tier: FakeTier, outcome: TransferOutcome = TransferOutcome.DONE) -> None:
    """All stores that are due begin and end."""
    bench.manager.tick()
    while tier.stores:  # only a few slots may be under way at once
        tier.finish(outcome)
        bench.manager.tick()
    bench.assert_sound()


def on_disk(tier: FakeTier, prompt: RequestNames = PROMPT, group: str = "full") -> list[bool]:
    return tier.contains([PageKey(name, group) for name in prompt.names])


def withheld(bench: Bench) -> dict[str, int]:
    return dict(bench.host.stats.pages_withheld)


@pytest.mark.parametrize(
    ("rules", "users", "expected"),
    [
        (PersistRules(), [], None),
        (AFTER_HITS, [], Withheld.NO_HIT),
        (AFTER_HITS, [OWNER], Withheld.NO_HIT),
        (AFTER_HITS, [OWNER._replace(generation=8)], None),
        (AFTER_HITS, [OWNER._replace(slot=4)], None),
        (PersistRules(min_tokens=120), [], None),
        (PersistRules(min_tokens=121), [], Withheld.SHORT_PROMPT),
        (PersistRules(min_tokens=121), [PageUser(4, 1, 121), PageUser(5, 1, 5)], None),
        (PersistRules(PersistPolicy.AFTER_HITS, 121), [PageUser(4, 1, 120)], Withheld.SHORT_PROMPT),
        (PersistRules(PersistPolicy.AFTER_HITS, 121), [PageUser(4, 1, 121)], None),
    ],
)
def test_the_rules_go_by_who_wanted_a_page(rules: PersistRules, users: list[PageUser], expected: Withheld | None):
    use = PageUse(OWNER)
    for user in users:
        use.note(user)
    assert rules.verdict(use) is expected


def test_write_through_persists_every_page_that_becomes_ready(tier: FakeTier):
    bench = bench_of(tier, PersistRules())
    bench.store(PROMPT, PageRange("full", 0, 2), PageRange("state", 1, 1))
    settle(bench, tier)
    assert (on_disk(tier), on_disk(tier, group="state")) == ([True, True], [False, True])
    assert withheld(bench) == {}


def test_after_hits_leaves_a_page_that_only_its_own_request_wants(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS)
    bench.store(PROMPT)
    settle(bench, tier)
    assert bench.present(PROMPT) == [True, True], "the same request looks it up"
    bench.store(request(0, "a", "b", "c"))  # and claims it again on the way to the rest
    settle(bench, tier)
    assert tier.objects == {}
    assert withheld(bench) == {"no_hit": 3}, "each page is counted once"


def test_after_hits_persists_what_an_acquire_pins(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS)
    bench.store(PROMPT)
    bench.slot = 1
    assert bench.acquire(PROMPT, PageRange("full", 0, 1)).outcome is AcquireOutcome.GRANTED
    settle(bench, tier)
    assert on_disk(tier) == [True, False]


def test_after_hits_persists_what_another_request_claims(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS)
    bench.store(PROMPT)
    bench.slot = 1
    reply = bench.claim(request(0, "a", "c"))
    assert [index for _, index, _, _ in reply.granted] == [1]
    settle(bench, tier)
    assert on_disk(tier) == [True, False]


def test_after_hits_persists_what_another_request_claims_by_name(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS)
    bench.store(PROMPT)
    named = {"names": b"".join(PROMPT.names), "parents": PROMPT.root, "root": PROMPT.root}
    assert bench.claim(PROMPT, **named).num_present == 2
    settle(bench, tier)
    assert on_disk(tier) == [False, False]
    bench.slot = 1
    bench.claim(PROMPT, **named)
    settle(bench, tier)
    assert on_disk(tier) == [True, True]


def test_after_hits_persists_a_page_that_was_claimed_again_while_it_was_filled(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS)
    first = bench.claim(PROMPT)
    bench.slot = 1
    assert bench.claim(PROMPT).num_present == 2
    bench.finish_store(first)
    settle(bench, tier)
    assert on_disk(tier) == [True, True]


def test_after_hits_persists_what_another_request_looks_up(tier: FakeTier):
    """A prefix that stays on the device is neither loaded nor claimed again, however often it is used."""
    bench = bench_of(tier, AFTER_HITS)
    bench.store(PROMPT)
    bench.slot = 1
    bench.probe(request(0, "a", "other"))
    settle(bench, tier)
    assert on_disk(tier) == [True, False]


def test_a_page_that_was_hit_gets_another_chance_before_it_is_evicted(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS, num_slots=20)
    bench.store(PROMPT)
    bench.slot = 1
    bench.probe(PROMPT)
    settle(bench, tier, TransferOutcome.REFUSED)
    bench.advance(1)
    assert tier.stores == [], "there is room: no hurry"
    tier.refused.clear()
    bench.slot = 2
    bench.store(request("cold", *range(18)))
    assert bench.host.pool.num_free == 0
    for _ in range(4):  # one page at a time may be under way in so small an arena
        bench.advance(1)
        tier.finish(TransferOutcome.REFUSED)
    assert sorted(tier.refused) == sorted(PageKey(name, "full") for name in PROMPT.names), "once each, and no other"
    bench.probe(PROMPT)
    for _ in range(3):
        bench.advance(1)
        tier.finish()
    bench.manager.tick()
    assert on_disk(tier) == [True, True], "used again: tried again"
    bench.store(request("more", *range(8)))
    bench.assert_idle()


def test_write_through_does_not_try_again_before_eviction(tier: FakeTier):
    bench = bench_of(tier, PersistRules(), num_slots=20)
    bench.store(request(0, *range(18)))
    bench.store(request(1, *range(2)))
    assert bench.host.pool.num_free == 0
    settle(bench, tier, TransferOutcome.REFUSED)
    assert len(tier.refused) == 20
    bench.advance(1)
    assert tier.stores == []


def test_pages_of_short_prompts_stay_out_until_a_long_one_has_them(tier: FakeTier):
    bench = bench_of(tier, LONG_ONLY)
    bench.store(PROMPT, num_prompt=99)
    bench.slot = 1
    bench.claim(PROMPT, num_prompt=60)
    settle(bench, tier)
    assert tier.objects == {}
    assert withheld(bench) == {"short_prompt": 2}
    bench.slot = 2
    bench.claim(request(0, "a", "c"), num_prompt=100)
    settle(bench, tier)
    assert on_disk(tier) == [True, False]


def test_an_acquire_tells_the_length_of_its_prompt_too(tier: FakeTier):
    bench = bench_of(tier, LONG_ONLY)
    bench.store(PROMPT, num_prompt=99)
    bench.slot = 1
    bench.acquire(replace(PROMPT, num_prompt=300), PageRange("full", 0, 1))
    settle(bench, tier)
    assert on_disk(tier) == [True, False]
    bench.probe(replace(PROMPT, num_prompt=300))
    settle(bench, tier)
    assert on_disk(tier) == [True, True], "so does a lookup"


def test_a_claim_by_name_brings_the_length_of_a_prompt_that_is_gone(tier: FakeTier):
    bench = bench_of(tier, LONG_ONLY)
    for root, num_prompt in ((1, 99), (2, 100)):
        prompt = request(root, "a")
        named = {"names": prompt.names[0], "parents": prompt.root, "root": prompt.root, "num_prompt": num_prompt}
        bench.finish_store(bench.claim(prompt, **named))
    settle(bench, tier)
    assert [on_disk(tier, request(root, "a")) for root in (1, 2)] == [[False], [True]]


def test_what_the_tier_has_dropped_must_pass_the_rules_again(tier: FakeTier):
    bench = bench_of(tier, AFTER_HITS)
    bench.store(PROMPT)
    bench.slot = 1
    bench.probe(PROMPT)
    settle(bench, tier)
    tier.evicted += list(tier.objects)
    tier.objects.clear()
    settle(bench, tier)
    assert on_disk(tier) == [False, False], "not written again at once"
    bench.slot = 2
    bench.claim(PROMPT)
    settle(bench, tier)
    assert on_disk(tier) == [True, True]
