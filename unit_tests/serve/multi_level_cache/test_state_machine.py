"""Random histories of the cache manager against a simple model, with all invariants checked after each step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve.ipc.messages import AcquireReply, ClaimReply, LeaseLost, PageRange, SlotsInUse
from serve.multi_level_cache.page_state import PageKey
from serve.multi_level_cache.request_names import RequestNames
from serve.multi_level_cache.secondary_tier import TransferOutcome
from serve.types import AcquireOutcome, Durability, JobId, JobResult, PageContent
from unit_tests.serve.multi_level_cache.builders import Bench, request
from unit_tests.serve.multi_level_cache.fake_tier import FakeTier

NUM_SLOTS = 24
NUM_RANKS = 2
ROOTS = 2

requests = st.builds(
    lambda root, tokens: request(root, *tokens),
    st.integers(0, ROOTS - 1),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)
dice = st.integers(0, 3)


@dataclass
class Job:
    """What the model knows of a job. keys: of the granted pages."""

    job: JobId
    is_store: bool
    keys: list[PageKey]
    slots: list[int]
    begun: bool = False
    answers: dict[int, JobResult] = field(default_factory=dict)


class CacheMachine(RuleBasedStateMachine):
    """The model: jobs that hold something, by id; what may be READY; which slots are in somebody's hands."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make_tier()
        self.bench = Bench(NUM_SLOTS, self.tier)
        self.asked: dict[JobId, list[PageKey]] = {}  # acquires without a reply yet
        self.epoch = 1
        self.living: dict[JobId, Job] = {}
        self.published: set[PageKey] = set()  # ever published and not known to be dropped: an upper bound of READY
        self.slots_written: dict[int, JobId] = {}  # begun store jobs write here, whatever the manager believes
        self.late: dict[JobId, Job] = {}  # begun after their claim had lapsed
        self.lapsed: dict[JobId, Job] = {}
        self.stored: list[RequestNames] = []
        self.bench.manager.engine_up(1, NUM_RANKS)

    def make_tier(self) -> FakeTier | None:
        return None

    # --- the router ------------------------------------------------------------------------------------------------

    @rule(names=requests)
    def probe(self, names: RequestNames) -> None:
        for group in ("full", "state"):
            for name, there in zip(names.names, self.bench.present(names, group), strict=True):
                assert not there or PageKey(name, group) in self.published

    @rule(names=requests, atomic=st.booleans(), state=st.booleans(), by_name=st.booleans())
    def claim(self, names: RequestNames, atomic: bool, state: bool, by_name: bool) -> None:
        self.claim_job(names, atomic, state, by_name)

    def claim_job(self, names: RequestNames, atomic: bool, state: bool, by_name: bool) -> JobId:
        last = len(names.names) - 1
        ranges = [PageRange("full", 0, last + 1)] + ([PageRange("state", last, 1)] if state else [])
        more: dict[str, object] = {}
        if by_name:
            parents = [names.root] + ([names.names[last - 1] if last else names.root] if state else [])
            body = names.names + ([names.names[last]] if state else [])
            more = {"names": b"".join(body), "parents": b"".join(parents), "root": names.root}
        job = self.bench.job(self.epoch)
        reply = self.bench.claim(names, *ranges, job=job, ranks=NUM_RANKS, atomic=atomic, **more)
        num_wanted = sum(each.count for each in ranges)
        assert len(reply.granted) + reply.num_present + reply.num_refused == num_wanted
        if atomic:
            assert not reply.granted or not reply.num_refused
        self._check_grant(names, reply)
        return job

    def _check_grant(self, names: RequestNames, reply: ClaimReply) -> None:
        keys: list[PageKey] = []
        slots: list[int] = []
        for group, index, page_slots, generations in reply.granted:
            keys.append(PageKey(names.names[index], group))
            slots += page_slots
            assert len(page_slots) == len(generations) == (1 if group == "full" else 3)
        assert len(set(slots)) == len(slots)
        for slot in slots:
            assert slot not in self.slots_written, "a slot was given away while a job writes into it"
        for other in self.living.values():
            assert not set(slots) & set(other.slots), "a slot was given away while a job holds it"
        if self.tier is None:
            self.published -= set(keys)
        if keys:
            self.living[reply.job] = Job(reply.job, True, keys, slots)

    @rule(names=requests, state=st.booleans())
    def store(self, names: RequestNames, state: bool) -> None:
        """A store job that goes well."""
        job = self.claim_job(names, False, state, False)
        if job in self.living:
            self.begin_job(job)
            for rank in range(NUM_RANKS):
                self.answer_job(job, rank, JobResult.DONE, False)
            self.stored.append(names)

    @rule(data=st.data(), state=st.booleans())
    def acquire_what_was_stored(self, data: st.DataObject, state: bool) -> None:
        if self.stored:
            self.acquire(self.stored[data.draw(st.integers(0, len(self.stored) - 1), label="prompt")], state)

    @rule(data=st.data(), rank=st.integers(0, NUM_RANKS - 1))
    def work_on_a_lapsed_claim(self, data: st.DataObject, rank: int) -> None:
        if self.lapsed:
            job = data.draw(st.sampled_from(sorted(self.lapsed, key=lambda each: each.counter)), label="job")
            self.begin_job(job)
            self.answer_job(job, rank, JobResult.DONE, False)

    @rule(names=requests, state=st.booleans())
    def acquire(self, names: RequestNames, state: bool) -> None:
        last = len(names.names) - 1
        ranges = [PageRange("full", 0, last + 1)] + ([PageRange("state", last, 1)] if state else [])
        job = self.bench.job(self.epoch)
        self.bench.acquire_later(names, *ranges, job=job, ranks=NUM_RANKS)
        keys = [PageKey(name, "full") for name in names.names] + (
            [PageKey(names.names[last], "state")] if state else []
        )
        self.asked[job] = keys
        self.read_replies()
        assert self.tier is not None or not self.asked

    def read_replies(self) -> None:
        for reply in self.bench.post.take():
            assert isinstance(reply, AcquireReply)
            self._on_acquired(reply, self.asked.pop(reply.job))

    def _on_acquired(self, reply: AcquireReply, keys: list[PageKey]) -> None:
        job = reply.job
        if reply.outcome is AcquireOutcome.GRANTED:
            slots = [slot for each in reply.slots for slot in each]
            assert set(keys) <= self.published
            assert not set(slots) & set(self.slots_written)
            self.living[job] = Job(job, False, keys, slots)
        else:
            assert (reply.outcome is AcquireOutcome.MISSING) == bool(reply.missing)
            assert not reply.slots

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.begin_job(self._any_job(data))

    def _any_job(self, data: st.DataObject) -> JobId:
        """A job that somebody may still talk of, or one that never was."""
        known = [*self.living, *self.late, *self.lapsed, JobId(self.epoch, 10**6)]
        return known[data.draw(st.integers(0, len(known) - 1), label="job")]

    def begin_job(self, job: JobId) -> None:
        self.bench.begin(job)
        replies = self.bench.post.take()
        known = self.living.get(job)
        if known is not None:
            known.begun = True
            assert replies == []
            if known.is_store:
                self.slots_written |= dict.fromkeys(known.slots, job)
            return
        assert replies == [LeaseLost(job)]
        lapsed = self.lapsed.pop(job, None)
        if lapsed is not None:  # the router sent it just too late: the ranks write into the slots
            self.late[job] = lapsed
            self.slots_written |= dict.fromkeys(lapsed.slots, job)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        job = self._any_job(data)
        self.bench.release(job)
        known = self.living.get(job)
        if known is not None and not known.begun:
            del self.living[job]

    # --- the workers -----------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        rank=st.integers(0, NUM_RANKS),
        result=st.sampled_from([JobResult.DONE, JobResult.DONE, JobResult.DONE, JobResult.FAILED, JobResult.CANCELLED]),
        bad=st.booleans(),
    )
    def answer(self, data: st.DataObject, rank: int, result: JobResult, bad: bool) -> None:
        self.answer_job(self._any_job(data), rank, result, bad)

    def answer_job(self, job: JobId, rank: int, result: JobResult, bad: bool) -> None:
        known = self.living.get(job) or self.late.get(job)
        if known is None or (not known.begun and job in self.living):
            return  # no worker has it
        is_bad = bad and not known.is_store and result is JobResult.FAILED
        self.bench.answer(job, rank, result, bad_slots=known.slots[:1] if is_bad else [])
        if rank >= NUM_RANKS:
            return
        known.answers.setdefault(rank, result)
        if len(known.answers) == NUM_RANKS:
            self._end(known)

    def _end(self, known: Job) -> None:
        if self.late.pop(known.job, None) is not None:
            self._stop_writing(known.job)
            return
        del self.living[known.job]
        self._stop_writing(known.job)
        if known.is_store and all(result is JobResult.DONE for result in known.answers.values()):
            self.published |= set(known.keys)

    def _stop_writing(self, job: JobId) -> None:
        self.slots_written = {slot: writer for slot, writer in self.slots_written.items() if writer != job}

    # --- time, crashes, operators ----------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.read_replies()
        before = {job for job in self.living if self.bench.host.leases.get(job) is not None}
        self.bench.advance(seconds)
        self.read_replies()
        for job in before:
            if self.bench.host.leases.get(job) is None:
                known = self.living.pop(job)
                assert not known.begun, "a deadline ended a job that had begun"
                if known.is_store:
                    self.lapsed[job] = known

    @rule(dice=dice)
    def engine_dies(self, dice: int) -> None:
        if dice:
            return  # rarely, so that histories grow long
        self.bench.manager.engine_down(self.epoch)
        self.living, self.late, self.lapsed, self.slots_written, self.asked = {}, {}, {}, {}, {}
        self.epoch += 1
        self.bench.manager.engine_up(self.epoch, NUM_RANKS)
        if self.tier is None:
            self.bench.assert_idle()

    @rule(root=st.none() | st.integers(0, ROOTS - 1), dice=dice)
    def flush(self, root: int | None, dice: int) -> None:
        if dice:
            return
        names = request(root, 0).root if root is not None else None
        self.bench.manager.flush(names)
        if names is None:
            assert self.bench.host.directory.num_pages == 0
            if self.tier is None:
                self.published.clear()
        assert not any(node.root == names for node in self.bench.host.directory.nodes())

    @rule(dice=dice)
    def manager_dies(self, dice: int) -> None:
        """A new manager over the same arena; workers tell which jobs run on."""
        if dice:
            return
        running = [
            known for known in [*self.living.values(), *self.late.values()] if known.begun or known.job in self.late
        ]
        if self.tier is not None:
            self.tier.stores, self.tier.loads, self.tier.results = [], [], []
        old, self.bench = self.bench, Bench(tier=self.tier, arena=self.bench.arena, clock=self.bench.clock)
        self.bench._counter = old._counter
        self.bench.manager.engine_up(self.epoch, NUM_RANKS)
        for rank in range(NUM_RANKS):
            reply = self.bench.claim(request(0, 9), ranks=NUM_RANKS, job=self.bench.job(self.epoch))
            assert not reply.granted, "allocated before all workers had told"
            mine = [known for known in running if rank not in known.answers]
            slots = [slot for known in mine for slot in known.slots]
            self.bench.manager.handle(
                SlotsInUse(self.bench.manager.resync.nonce, rank, [known.job for known in mine], slots)
            )
        if self.tier is None:
            self.published = set()
        self.lapsed, self.asked = {}, {}
        self.late = {known.job: known for known in running}
        self.living = {}
        for known in running:
            self.slots_written |= dict.fromkeys(known.slots, known.job)

    # --- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        self.bench.assert_sound()

    @invariant()
    def bytes_in_use_stay(self) -> None:
        directory = self.bench.host.directory
        for page in directory.pages():
            writers = {self.slots_written[slot] for slot in page.slots if slot in self.slots_written}
            if page.content is PageContent.READY and page.doomed is None:
                assert not writers, "a page is readable while a job writes into it"
                assert page.key in self.published, "a page is readable although its store did not go well"
        for known in self.living.values():
            assert self.bench.host.leases.get(known.job) is not None
        assert {lease.job for lease in self.bench.host.leases} <= {*self.living, *self.asked}

    @invariant()
    def limits_hold(self) -> None:
        host = self.bench.host
        assert host.directory.slots_pinned + host.budget.num_promoting < max(host.pool.num_backed / 2, 1)

    def close_tier(self) -> None:
        """Nothing is in flight in a lower tier any more."""

    def teardown(self) -> None:
        """When all jobs have ended, everything is free or READY."""
        for known in list(self.living.values()) + list(self.late.values()):
            if known.job in self.living and not known.begun:
                self.bench.release(known.job)
            for rank in range(NUM_RANKS):
                self.bench.answer(known.job, rank)
        for job in self.asked:
            self.bench.release(job)
        self.close_tier()
        self.bench.assert_idle()
        self.bench.arena.close()


CacheMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = pytest.mark.timeout(240)(CacheMachine.TestCase)


class TieredMachine(CacheMachine):
    """The same over a lower tier, whose transfers end at random times in random ways."""

    def make_tier(self) -> FakeTier:
        return FakeTier()

    @rule()
    def tick(self) -> None:
        self.bench.manager.tick()
        self.read_replies()

    @rule(outcome=st.sampled_from([TransferOutcome.DONE] * 4 + [TransferOutcome.FAILED, TransferOutcome.CORRUPT]))
    def transfers_end(self, outcome: TransferOutcome) -> None:
        assert self.tier is not None
        self.tier.finish(outcome)
        self.tick()

    @rule(data=st.data())
    def the_tier_evicts(self, data: st.DataObject) -> None:
        assert self.tier is not None
        if self.tier.objects:
            key = data.draw(st.sampled_from(sorted(self.tier.objects)), label="evicted")
            del self.tier.objects[key]
            self.tier.evicted.append(key)

    @rule(data=st.data(), state=st.booleans())
    def acquire_what_only_the_tier_has(self, data: st.DataObject, state: bool) -> None:
        for _ in range(4):
            self.transfers_end(TransferOutcome.DONE)
        for room in range(NUM_SLOTS, 0, -1):
            if self.bench.host.directory.make_room(room):
                break
        self.acquire_what_was_stored(data, state)

    @invariant()
    def durable_pages_are_in_the_tier(self) -> None:
        assert self.tier is not None
        gone = {*self.tier.evicted}
        for page in self.bench.host.directory.pages():
            if page.durability is Durability.DURABLE and page.doomed is None:
                assert page.key in self.tier.objects or page.key in gone

    def close_tier(self) -> None:
        assert self.tier is not None
        for _ in range(NUM_SLOTS * 2):
            self.tier.finish()
            self.bench.manager.tick()
            self.bench.post.take()


TieredMachine.TestCase.settings = settings(CacheMachine.TestCase.settings, max_examples=300)
TestTieredMachine = pytest.mark.timeout(240)(TieredMachine.TestCase)
