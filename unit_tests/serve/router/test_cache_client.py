"""A question to the cache manager costs at most its deadline."""

from serve.ipc.messages import (
    Acquire,
    AcquireReply,
    CacheDown,
    CacheUp,
    ClaimReply,
    PageRange,
    Probe,
    ProbeReply,
    Release,
)
from serve.router.cache_client import CacheClient, ProbePolicy
from serve.types import AcquireOutcome, JobId, RequestStatus
from unit_tests.serve.router.router_fakes import Harness, prompt_of
from unit_tests.serve.router.test_request import make_request


class _Manager:
    def __init__(self) -> None:
        self.probes = []
        self.is_full = False

    def send(self, probe) -> bool:
        if not self.is_full:
            self.probes.append(probe)
        return not self.is_full


def test_an_answer_in_time_finds_its_request():
    manager, request = _Manager(), make_request(slot=4)
    client = CacheClient(manager.send, ProbePolicy(0.05))
    assert client.ask(request, 3, now=0.0)
    probe = manager.probes[0]
    assert (probe.slot, probe.generation, probe.num_pages) == (4, 1, 3)
    assert client.take(ProbeReply(probe.probe_id, {}, {})) is request
    assert client.next_deadline() is None


def test_no_answer_is_a_miss_at_the_deadline():
    manager, request = _Manager(), make_request()
    client = CacheClient(manager.send, ProbePolicy(0.05))
    client.ask(request, 3, now=1.0)
    assert client.next_deadline() == 1.05
    assert client.pop_expired(1.04) == []
    assert client.pop_expired(1.05) == [request]
    assert client.take(ProbeReply(0, {}, {})) is None


def test_a_manager_that_is_away_costs_nothing_after_a_few_misses():
    manager = _Manager()
    client = CacheClient(manager.send, ProbePolicy(0.05, max_silence=2, retry_s=5.0))
    for now in (0.0, 1.0):
        assert client.ask(make_request(), 1, now)
        client.pop_expired(now + 0.1)
    assert client.ask(make_request(), 1, 2.0)  # one more, then quiet
    assert not client.ask(make_request(), 1, 2.1)
    assert not client.ask(make_request(), 1, 6.9)
    assert client.ask(make_request(), 1, 7.0)
    client.take(ProbeReply(3, {}, {}))
    assert client.ask(make_request(), 1, 7.1)
    assert client.ask(make_request(), 1, 7.2)


def test_a_short_stall_of_the_manager_costs_a_second_of_hits_at_most():
    manager = _Manager()
    client = CacheClient(manager.send, ProbePolicy())
    for _ in range(ProbePolicy().max_silence + 1):
        assert client.ask(make_request(), 1, 0.0)
    assert client.pop_expired(0.1)
    assert client.ask(make_request(), 1, 0.2)  # one more, then quiet
    assert not client.ask(make_request(), 1, 0.3)
    assert client.ask(make_request(), 1, 1.0)
    client.take(ProbeReply(len(manager.probes) - 1, {}, {}))
    assert client.request(Acquire(JobId(1, 1), 0, 1, [], 1, 1.0), 1.0)


def test_no_manager_no_pages_or_a_full_mailbox_are_misses_at_once():
    manager = _Manager()
    assert not CacheClient(None, ProbePolicy()).ask(make_request(), 3, 0.0)
    client = CacheClient(manager.send, ProbePolicy())
    assert not client.ask(make_request(), 0, 0.0)
    manager.is_full = True
    assert not client.ask(make_request(), 3, 0.0)
    assert len(client) == 0


def test_a_request_waits_for_each_answer_until_its_deadline_and_then_runs():
    harness = Harness().with_cache()
    client = harness.submit(prompt_of(40))
    request = harness.router.requests[client.slot]
    assert request.status is RequestStatus.LOOKING_UP
    assert not harness.plans
    harness.router.turn([ProbeReply(harness.probes[0].probe_id, {"full": b"\x03"}, {})])
    assert request.status is RequestStatus.LOADING
    acquire = harness.probes[1]
    assert acquire.ranges == [PageRange("full", 0, 2)]
    harness.clock.advance(harness.router.next_deadline() - harness.clock.now)
    harness.router.turn([])
    assert harness.probes[2] == Release(acquire.job)
    harness.run()
    harness.check_tokens(client)
    harness.check_idle()


def test_a_request_goes_on_without_an_answer():
    harness = Harness().with_cache()
    client = harness.submit(prompt_of(40))
    harness.clock.advance(harness.router.next_deadline() - harness.clock.now)
    harness.router.turn([])
    harness.run()
    harness.check_tokens(client)


def test_a_request_that_is_looked_up_does_not_stand_in_the_way():
    harness = Harness().with_cache()
    harness.submit(prompt_of(40))
    short = harness.submit(prompt_of(5))
    harness.run()
    harness.check_tokens(short)


def test_an_abort_while_looking_up_frees_everything():
    harness = Harness().with_cache()
    client = harness.submit(prompt_of(40))
    harness.abort(client)
    harness.router.turn([ProbeReply(harness.probes[0].probe_id, {}, {})])
    assert client.is_released
    harness.check_idle()


def test_the_managers_death_is_a_miss_for_all_and_silence_until_the_next():
    harness = Harness().with_cache()
    client = harness.submit(prompt_of(40))
    harness.router.turn([CacheDown()])
    harness.run()
    harness.check_tokens(client)
    harness.submit(prompt_of(40, 1))
    assert len(harness.probes) == 1
    harness.router.turn([CacheUp(1)])
    harness.submit(prompt_of(40, 2))
    assert isinstance(harness.probes[1], Probe)


def test_what_the_dead_manager_had_still_sent_opens_nothing():
    harness = Harness().with_cache()
    stale = [ProbeReply(0, {}, {}), AcquireReply(JobId(1, 1), AcquireOutcome.STALE), ClaimReply(JobId(1, 2), [])]
    harness.router.turn([CacheDown(), *stale])
    harness.submit(prompt_of(40))
    assert not [probe for probe in harness.probes if isinstance(probe, Probe)]
    harness.router.turn([CacheUp(1)])
    harness.submit(prompt_of(40, 1))
    assert isinstance(harness.probes[-1], Probe)


def test_prompt_logprobs_skip_the_lookup():
    harness = Harness().with_cache()
    harness.submit(prompt_of(40), prompt_logprobs=0)
    assert not harness.probes
    harness.run()
    harness.check_idle()
