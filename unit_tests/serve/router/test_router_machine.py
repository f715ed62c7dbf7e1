"""The router under random use: every request ends once, with the model's tokens, and nothing leaks."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve.ipc.messages import JobAnswer, ServerDown, SubmitRequest
from serve.multi_level_cache.page_state import DropReason
from serve.types import FinishReason, JobResult, PageContent
from unit_tests.serve.router.router_fakes import PAGE, Client, Harness, expected_tokens, prompt_of
from unit_tests.serve.router.tier_fakes import TierHarness

# Few prompts that share prefixes of all kinds: whole pages, parts of pages, one within another.
_BASE = prompt_of(5 * PAGE, 1)
PROMPTS = [
    *(_BASE[:length] for length in (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 5, 5 * PAGE)),
    _BASE[: 2 * PAGE] + prompt_of(PAGE + 3, 2),
    prompt_of(2 * PAGE + 1, 3),
]
GROUPS = [
    ("full",),
    ("full", "index"),
    ("full", "window"),
    ("full", "state"),
    ("full", "window", "state"),
    ("full", "state", "tail"),
    ("full", "rest"),
    ("window",),
    ("state",),
]


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness | None = None
        self.living: list[Client] = []
        self.cut: dict[tuple[int, int], int] = {}  # accepted tokens of requests that a stop string ended
        self.unheard: list[Client] = []

    @initialize(
        num_pages=st.integers(6, 20),
        num_ranks=st.integers(1, 2),
        max_rows=st.integers(1, 5),
        budget=st.sampled_from([8, 24, 64]),
        with_cache=st.sampled_from([False, True, True, True]),
        is_warm=st.booleans(),
        num_slots=st.sampled_from([3, 8, 20, 40]),
        options=st.fixed_dictionaries(
            {
                "by_priority": st.booleans(),
                "stores_output": st.booleans(),
                "cache_is_sync": st.booleans(),
                "max_loading_fraction": st.sampled_from([0.1, 0.5, 1.0]),
                "groups": st.sampled_from(GROUPS),
                "checkpoint_interval": st.sampled_from([1, 2 * PAGE, 2048]),
                "pool_sizes": st.sampled_from([None, {"window": 4, "state": 4, "tail": 4}, {"window": 7, "state": 9}]),
            }
        ),
    )
    def start(self, num_pages, num_ranks, max_rows, budget, with_cache, is_warm, num_slots, options) -> None:
        settings = {
            "num_pages": num_pages,
            "num_ranks": num_ranks,
            "max_rows": max_rows,
            "batch_max_tokens": budget,
            "max_queue_size": 6,
            **options,
        }
        self.harness = TierHarness(num_slots, **settings) if with_cache else Harness(**settings)

        if self.tiers is not None and is_warm:
            for prompt in (PROMPTS[-3], PROMPTS[-2]):
                client = self.harness.submit(prompt, max_tokens=1)
                self.harness.run()
                self._check_tokens(client)
            self.tiers.evict_device()

    @property
    def tiers(self) -> TierHarness | None:
        return self.harness if isinstance(self.harness, TierHarness) else None

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 60),
        count=st.integers(1, 3),
        ignore_eos=st.booleans(),
        server=st.integers(0, 1),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def submit_some(self, prompt, max_tokens, count, ignore_eos, server, priority, prompt_logprobs) -> None:
        self.submit(prompt, max_tokens, count, ignore_eos, server, priority, prompt_logprobs)

    def submit(self, prompt, max_tokens, count, ignore_eos, server, priority, prompt_logprobs) -> None:
        if len(self.living) > 20:
            return
        clients = [
            self.harness.fill(
                prompt, server, max_tokens=max_tokens, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs
            )
            for _ in range(count)
        ]
        self.living += clients
        self.harness.router.turn(
            [SubmitRequest(c.slot, c.generation, c.server, f"r{c.slot}", priority) for c in clients]
        )

    @precondition(lambda self: self.harness and self.harness.is_busy)
    @rule(data=st.data(), count=st.integers(1, 12))
    def step(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            ready = [worker.rank for worker in self.harness.workers if worker.plans]
            if not ready:
                return
            self.harness.step(data.draw(st.sampled_from(ready)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.living))
        if client.tokens:
            self.harness.finish(client, data.draw(st.integers(0, len(client.tokens))))

    @rule(server=st.integers(0, 1))
    def server_down(self, server: int) -> None:
        gone = [client for client in self.living if client.server == server and not client.finishes]
        self.harness.router.turn([ServerDown(server)])
        self.unheard += [client for client in gone if not client.finishes]
        self.living = [client for client in self.living if client not in self.unheard]

    # --- the tier below: every message waits until it is delivered ---

    @precondition(lambda self: self.tiers and self.tiers.manager and self.tiers.to_manager)
    @rule(data=st.data())
    def manager_reads(self, data: st.DataObject) -> None:
        mail = self.tiers.to_manager
        for _ in range(data.draw(st.integers(1, len(mail)))):
            self.tiers.manager.handle(mail.popleft())

    @precondition(lambda self: self.tiers and self.tiers.manager)
    @rule()
    def manager_ticks(self) -> None:
        """Deadlines of leases pass only when all mail is read."""
        self.tiers.deliver_to_manager()

    @precondition(lambda self: self.tiers and self.tiers.to_router)
    @rule(data=st.data())
    def router_reads(self, data: st.DataObject) -> None:
        """Any number of messages; each sender's stay in order, senders overtake each other."""
        mail = self.tiers.to_router
        messages = [mail.popleft() for _ in range(data.draw(st.integers(1, len(mail))))]
        if data.draw(st.booleans()):
            messages.sort(key=lambda message: isinstance(message, JobAnswer))
        self.harness.router.turn(messages)

    @precondition(lambda self: self.tiers and any(worker.jobs for worker in self.tiers.workers))
    @rule(data=st.data(), result=st.sampled_from([*JobResult, *[JobResult.DONE] * 6]))
    def run_job(self, data: st.DataObject, result: JobResult) -> None:
        jobs = [(w.rank, job) for w in self.tiers.workers for job in w.jobs if w.can_run(job)]
        if jobs:
            self.tiers.answer(*data.draw(st.sampled_from(jobs)), result)

    @precondition(lambda self: self.tiers)
    @rule()
    def all_arrives(self) -> None:
        self.tiers.deliver()

    @precondition(lambda self: self.tiers)
    @rule()
    def evict_device(self) -> None:
        for group in self.harness.ledger.groups.values():
            for page in list(group._idle):
                group.forget(page)
        self.harness.ledger.index_version += 1

    @rule(data=st.data())
    def evict_one_group_alone(self, data: st.DataObject) -> None:
        """Its other groups keep what they have of the same boundary."""
        group = data.draw(st.sampled_from(list(self.harness.ledger.groups.values())))
        idle = list(group._idle)
        if idle:
            for page in data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True)):
                self.harness.ledger.forget(group.spec.name, page)

    @precondition(lambda self: self.tiers and self.tiers.manager)
    @rule(data=st.data())
    def evict_host(self, data: st.DataObject) -> None:
        pages = [p for p in self.tiers.manager.host.directory.pages() if p.content is PageContent.READY]
        if pages:
            page = data.draw(st.sampled_from(sorted(pages, key=lambda page: page.slots)))
            self.tiers.manager.host.directory.drop(page, DropReason.EVICTED)

    @precondition(lambda self: self.tiers)
    @rule(count=st.integers(1, 4))
    def mail_is_quick(self, count: int) -> None:
        """Messages arrive, jobs take their time."""
        for _ in range(count):
            self.tiers.deliver_to_manager()
            self.tiers.deliver_to_router()

    @precondition(lambda self: self.tiers and self.tiers.manager)
    @rule(
        prompts=st.lists(st.sampled_from(PROMPTS[-5:]), min_size=1, max_size=3),
        max_tokens=st.integers(1, 60),
        num_hops=st.integers(0, 4),
        all_run=st.booleans(),
    )
    def load_something(self, prompts, max_tokens: int, num_hops: int, all_run: bool) -> None:
        """Requests whose pages are in the host only, stopped somewhere on their way."""
        if all_run:
            self.tiers.is_mailbox_full = False
            self.tiers.run()
        self.evict_device()
        for prompt in prompts:
            self.submit(prompt, max_tokens, 1, True, 0, 0, None)
        for _ in range(num_hops):
            self.tiers.deliver_to_manager()
            self.tiers.deliver_to_router()

    @rule(what=st.sampled_from(["nothing", "nothing", "device", "all"]))
    def flush(self, what: str) -> None:
        if what == "nothing":
            return
        self.harness.router.flush(quiet_s=1.0)
        if what == "all" and self.tiers is not None and self.tiers.manager is not None:
            self.tiers.manager.flush()
        self.harness.router.open_tiers()

    @precondition(lambda self: self.tiers)
    @rule(loses_mail=st.booleans(), dies=st.sampled_from([True, False, False]))
    def manager_dies_or_lives(self, loses_mail: bool, dies: bool) -> None:
        if self.tiers.manager is None:
            self.tiers.restart_manager()
            return
        if not dies:
            return
        self.tiers.kill_manager()
        if loses_mail:
            self.tiers.to_manager.clear()

    @precondition(lambda self: self.tiers)
    @rule(fullness=st.sampled_from([True, False, False]))
    def mailbox_fills_or_drains(self, fullness: bool) -> None:
        self.tiers.is_mailbox_full = fullness

    # --- time ---

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0]))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)
        self.harness.router.turn([])

    @invariant()
    def the_books_add_up(self) -> None:
        if self.harness is None:
            return
        self.harness.check()
        if self.tiers is not None and self.tiers.manager is not None:
            assert self.tiers.manager.check_integrity() == []
        self.living = [client for client in self.living if not client.is_released]
        assert len(self.harness.router.engine.pipeline) <= 2

    def teardown(self) -> None:
        if self.harness is None:
            return
        if self.tiers is not None:
            self.tiers.settle()
        for _ in range(200):
            self.harness.run()
            if not self.harness.router.requests:
                break
            self.harness.clock.advance(0.5)  # the only things still waited for have deadlines
            self.harness.router.turn([])
        for client in self.unheard:
            assert client.is_released
            assert not client.finishes
            del self.harness.clients[client.slot, client.generation]
        self.harness.check_idle()
        for client in self.harness.clients.values():
            self._check_tokens(client)
        self.harness.close()

    def _check_tokens(self, client: Client) -> None:
        expected = expected_tokens(client.prompt, client.sampling, self.harness.longest)
        if client.finishes == [FinishReason.LENGTH]:
            assert client.tokens == expected
        elif client.finishes == [FinishReason.ERROR]:
            assert not client.tokens
            assert client.last.error_code in (400, 429)
        else:
            assert client.tokens == expected[: len(client.tokens)]


RouterMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestRouterMachine = RouterMachine.TestCase
