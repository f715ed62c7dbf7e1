"""A disk that is slow or hangs costs one request a fraction of recomputing, and the others nothing."""

import pytest

from serve.ipc.messages import Acquire
from serve.multi_level_cache.secondary_tier import TransferOutcome
from serve.router.tier_statistics import Drop
from serve.types import CacheTier
from unit_tests.serve.multi_level_cache.fake_tier import FakeTier
from unit_tests.serve.router.router_fakes import PAGE, prompt_of
from unit_tests.serve.router.tier_fakes import TierHarness

NUM_PAGES = 24  # 384 tokens, that take 0.384 s to compute
COMPUTED_S = NUM_PAGES * PAGE / 1000


class HeldTier(FakeTier):
    """Nothing ends while it is held."""

    is_held = False

    def finish(self, outcome: TransferOutcome = TransferOutcome.DONE) -> None:
        if not self.is_held:
            super().finish(outcome)


def with_disk_pages() -> tuple[TierHarness, HeldTier]:
    """A disk that has the pages of `prompt_of(NUM_PAGES * PAGE)`; host and device have nothing."""
    tier = HeldTier()
    harness = TierHarness(128, lambda arena: tier)
    harness.serve(prompt_of(NUM_PAGES * PAGE + 5), max_tokens=1)
    for _ in range(NUM_PAGES):
        harness.manager.tick()
        tier.finish()
        harness.manager.tick()
    assert len(tier.objects) == NUM_PAGES
    empty(harness, tier)
    harness.sent_to_manager.clear()
    harness.clock.advance(60.0)
    tier.is_held = True
    return harness, tier


def empty(harness: TierHarness, tier: HeldTier) -> None:
    """Neither host nor device have anything."""
    tier.is_held = False
    for _ in range(NUM_PAGES):
        harness.manager.tick()
        tier.finish()
    for room in range(128, 0, -1):
        if harness.manager.host.directory.make_room(room):
            break
    harness.evict_device()
    tier.is_held = True


def ask(harness: TierHarness):
    client = harness.submit(prompt_of(NUM_PAGES * PAGE + 5), max_tokens=1)
    harness.deliver_to_manager()
    harness.deliver_to_router()
    harness.deliver_to_manager()
    return client


def acquires(harness: TierHarness) -> int:
    return sum(isinstance(message, Acquire) for message in harness.sent_to_manager)


def test_a_disk_that_hangs_costs_an_eighth_of_recomputing_once():
    harness, tier = with_disk_pages()
    began = harness.clock.now
    first = ask(harness)
    assert len(tier.loads) == NUM_PAGES
    wait_s = harness.router.next_deadline() - began
    assert wait_s == pytest.approx(COMPUTED_S / 8, rel=0.3)
    harness.clock.advance(wait_s)
    harness.router.turn([])
    harness.run()
    harness.check_tokens(first)
    assert harness.tiers.loader._statistics.num_dropped[Drop.LATE] == 1
    harness.evict_device()
    harness.clock.advance(30.0)
    second = ask(harness)
    harness.run()
    harness.check_tokens(second)
    assert acquires(harness) == 1, "the hung reads were told, so that nobody asks for more"
    assert harness.router.engine.costs.promotion_bytes_per_s(harness.clock.now) < 10_000
    tier.is_held = False
    tier.finish()
    harness.manager.tick()
    assert harness.num_ready() >= NUM_PAGES


def test_an_idle_disk_is_tried_again_at_nobodys_cost():
    harness, tier = with_disk_pages()
    first = ask(harness)
    harness.clock.advance(harness.router.next_deadline() - harness.clock.now)
    harness.router.turn([])
    harness.run()
    harness.check_tokens(first)
    harness.clock.advance(100.0)
    tier.is_held = False
    tier.finish()  # after more than a minute and a half
    harness.manager.tick()
    from_disk = []
    for _ in range(4):
        empty(harness, tier)
        harness.clock.advance(10.0)
        client = ask(harness)
        if not tier.loads:
            harness.clock.advance(1.0)
            harness.manager.tick()
        harness.clock.advance(0.001)  # the disk is quick again
        tier.is_held = False
        tier.finish()
        harness.manager.tick()
        harness.run()
        harness.check_tokens(client)
        from_disk.append(client.outputs[0].cached_tokens[CacheTier.DISK])
    assert harness.manager.host.stats.events["tier_probes"] >= 2
    assert from_disk[0] == 0, "the first is not made to wait for it"
    assert max(from_disk) > 0, "then it is used again"
