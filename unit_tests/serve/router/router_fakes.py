"""Builders and fakes for the router's tests: a clock, workers that run plans in memory, a server that listens."""

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from models.state_layout import HitPolicy
from serve.hashing import PageHasher
from serve.ipc.messages import (
    AbortRequest,
    FinishRequest,
    JoinRow,
    Message,
    OutputBatch,
    RequestOutput,
    SlotReleased,
    StepPlan,
    StepResult,
    SubmitRequest,
)
from serve.ipc.request_table import RequestTable, TableShape, slots_of_server
from serve.router.cache_client import CacheClient, ProbePolicy
from serve.router.cost_model import CostPrior
from serve.router.prefix_index import GroupSpec
from serve.router.router import Router
from serve.router.settings import EngineFacts, RouterSettings
from serve.types import FinishReason, SamplingParams

PAGE = 16
VOCAB = 61
EOS = 7
EPOCH = 3
PAGE_BYTES = 4096
# A state takes three host slots, and a rest nothing: it is empty at boundaries. A page of every other group takes one.
OBJECT_BYTES = {"state": 10000, "rest": 0}
HASHER = PageHasher(b"k" * 32, b"test", PAGE)


class FakeClock:
    """Time that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


# Groups of the tests by name; every other name is a FULL group. A token of a window sees this many before it.
WINDOW_TOKENS = 20
SPECS = {
    "window": GroupSpec("window", HitPolicy.TRAILING_PAGES, -(-WINDOW_TOKENS // PAGE)),
    "state": GroupSpec("state", HitPolicy.EXACT_CHECKPOINT),
    "tail": GroupSpec("tail", HitPolicy.EXACT_CHECKPOINT),
    "rest": GroupSpec("rest", HitPolicy.EXACT_CHECKPOINT),
}


_PAGED = (HitPolicy.ALL_PAGES, HitPolicy.TRAILING_PAGES)


def specs_of(groups: tuple[str, ...]) -> tuple[GroupSpec, ...]:
    return tuple(SPECS.get(group, GroupSpec(group)) for group in groups)


def model_token(tokens: list[int]) -> int:
    """What the fake model says after a prefix: any change of the prefix changes it."""
    return zlib.crc32(np.array(tokens, "<u4").tobytes()) % VOCAB


def expected_tokens(prompt: list[int], sampling: SamplingParams, total_limit: int) -> list[int]:
    """What a request must get when nothing ends it early."""
    tokens = list(prompt)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    while len(tokens) < min(len(prompt) + sampling.max_tokens, total_limit):
        tokens.append(model_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


@dataclass
class _Row:
    slot: int
    generation: int
    tokens: list[int]  # known, then sampled
    num_known: int
    num_computed: int
    pages: dict[str, list[int]]
    first_places: dict[str, int]


class FakeWorker:
    """Runs plans. A page holds the token ids that were computed into it, and every read checks them.

    A page of a group with checkpoints holds all tokens that its state has seen, a rest those behind the last boundary.
    """

    def __init__(self, rank: int, table: RequestTable, groups: tuple[str, ...]) -> None:
        self.rank = rank
        self.rows: dict[int, _Row] = {}
        self.plans: deque[StepPlan] = deque()
        self._table = table
        self._pages: dict[tuple[str, int], list[int | None]] = {}
        specs = specs_of(groups)
        self._checkpointed = [spec.name for spec in specs if spec.has_checkpoints]
        self._paged = [
            (spec.name, WINDOW_TOKENS if spec.has_window else None) for spec in specs if spec.policy in _PAGED
        ]

    def run_next(self) -> StepResult:
        plan = self.plans.popleft()
        self._apply(plan)
        result = StepResult(EPOCH, plan.step, self.rank, 0.01)
        chunked = dict(plan.chunks)
        assert len(chunked) == len(plan.chunks)
        for number, row in sorted(self.rows.items()):
            if number in chunked:
                assert row.num_computed + chunked[number] <= row.num_known, "a chunk beyond what is known"
                count = chunked[number]
            elif row.num_computed >= row.num_known and number not in plan.paused:
                count = 1
            else:
                continue
            self._compute(row, count)
            if row.num_computed >= row.num_known:
                token = model_token(self._read(row))
                row.tokens.append(token)
                result.rows.append(number)
                result.token_ids.append(token)
        for number, group, page in plan.snapshots:
            assert self.rows[number].num_computed % PAGE == 0, "a snapshot within a page"
            self._pages[group, page] = list(self._pages[group, self.rows[number].pages[group][0]])
        if self.rank != 0:
            result.rows, result.token_ids = [], []
        return result

    def _apply(self, plan: StepPlan) -> None:
        for number in plan.leaves:
            del self.rows[number]
        for join in plan.joins:
            assert join.row not in self.rows, "a row is taken twice"
            assert self._table.generation(join.slot) == join.generation
            assert not self._table.is_free(join.slot)
            assert join.num_cached < join.num_known
            tokens = [int(t) for t in self._table.tokens(join.slot)[: join.num_known]]
            pages = {group: list(ids) for group, ids in join.pages.items()}
            row = _Row(join.slot, join.generation, tokens, join.num_known, join.num_cached, pages, join.first_places)
            self.rows[join.row] = row
            for group in self._checkpointed:
                (working,) = pages[group]
                restored = join.restores.get(group)
                is_empty = restored is None or not OBJECT_BYTES.get(group, PAGE_BYTES)
                self._pages[group, working] = [] if is_empty else list(self._pages[group, restored])
            assert self._read(row) == tokens[: join.num_cached]
        for number, group, pages in plan.new_pages:
            self.rows[number].pages[group].extend(pages)

    def _compute(self, row: _Row, count: int) -> None:
        self._read(row)
        new = row.tokens[row.num_computed : row.num_computed + count]
        for position, token in enumerate(new, row.num_computed):
            for group, _ in self._paged:
                place = position // PAGE - row.first_places.get(group, 0)
                assert place >= 0
                page = row.pages[group][place]  # IndexError: a token without a page
                self._pages.setdefault((group, page), [None] * PAGE)[position % PAGE] = token
        row.num_computed += count
        for group in self._checkpointed:
            working = self._pages[group, row.pages[group][0]] + new
            self._pages[group, row.pages[group][0]] = self._state_of(group, working, row.num_computed)

    def _read(self, row: _Row) -> list[int]:
        """The computed prefix, checked against the pages as far as the next token sees them."""
        known = row.tokens[: row.num_computed]
        for group, window in self._paged:
            first = 0 if window is None else max(0, row.num_computed - window)
            found = []
            for position in range(first, row.num_computed):
                page = row.pages[group][position // PAGE - row.first_places.get(group, 0)]
                found.append(self._pages[group, page][position % PAGE])
            assert found == known[first:], f"a page of {group} does not hold the right prefix"
        for group in self._checkpointed:
            state = self._state_of(group, known, row.num_computed)
            assert self._pages[group, row.pages[group][0]] == state, f"{group} is not the state of the prefix"
        return known

    @staticmethod
    def _state_of(group: str, tokens: list[int], num_computed: int) -> list[int]:
        """What a state keeps of the tokens that it has seen."""
        is_whole = OBJECT_BYTES.get(group, PAGE_BYTES) > 0
        return tokens if is_whole else tokens[len(tokens) - num_computed % PAGE :]


@dataclass
class Client:
    """What one request was told."""

    slot: int
    generation: int
    server: int
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    finishes: list[FinishReason] = field(default_factory=list)
    is_released: bool = False

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def num_cached(self) -> int:
        return sum(self.outputs[0].cached_tokens or [])


class Harness:
    """A router with a real request table, fake workers and one or more listening servers."""

    def __init__(
        self,
        num_pages: int = 64,
        num_ranks: int = 1,
        groups: tuple[str, ...] = ("full",),
        pool_sizes: dict[str, int] | None = None,
        **settings,
    ) -> None:
        """pool_sizes: by group, pages of pools that have not `num_pages`."""
        values = {
            "epoch": EPOCH,
            "page_size": PAGE,
            "num_ranks": num_ranks,
            "max_rows": 8,
            "batch_max_tokens": 64,
            "chunked_prefill_size": 32,
            "max_total_len": 512,
            "max_queue_size": 100,
            "request_timeout_s": 3600.0,
            "step_timeout_s": 300.0,
            "eos_token_ids": frozenset({EOS}),
            "num_servers": 2,
            **settings,
        }
        self.settings = RouterSettings(**values)
        self.clock = FakeClock()
        self.table = RequestTable.create(TableShape(64, 512, PAGE))
        self.groups = groups
        self.workers = [FakeWorker(rank, self.table, groups) for rank in range(num_ranks)]
        self.clients: dict[tuple[int, int], Client] = {}
        self.plans: list[StepPlan] = []
        self.probes: list[Message] = []
        self.cache = CacheClient(None, ProbePolicy())
        self.num_pages = num_pages
        self.pool_sizes = pool_sizes or {}
        self.router = self._make_router()
        self.engine_up()

    def _make_router(self) -> Router:
        return Router(self.settings, self.table, self, self.cache, self.clock, lambda: 0.0)

    def with_cache(self) -> "Harness":
        """Let the router ask a cache manager; probes land in `probes`."""

        def send(probe: Message) -> bool:
            self.probes.append(probe)
            return True

        self.cache = CacheClient(send, ProbePolicy(deadline_s=0.05))
        self.router = self._make_router()
        self.engine_up()
        return self

    def engine_up(self) -> None:
        prior = CostPrior(prefill_tokens_per_s=1000.0, decode_step_s=0.01)
        pages = {group: self.pool_sizes.get(group, self.num_pages) for group in self.groups}
        page_bytes = {group: OBJECT_BYTES.get(group, PAGE_BYTES) for group in self.groups}
        self.router.engine_up(EngineFacts(specs_of(self.groups), pages, HASHER, prior, page_bytes))

    # --- Mail ---

    def to_workers(self, message: Message) -> None:
        assert isinstance(message, StepPlan)
        for join in message.joins:
            self.check_hit(join)
        self.plans.append(message)
        for worker in self.workers:
            worker.plans.append(message)

    def to_server(self, server: int, message: Message) -> None:
        if isinstance(message, SlotReleased):
            for slot, generation in message.slots:
                client = self.clients[slot, generation]
                assert not client.is_released, "a slot is released twice"
                client.is_released = True
                assert self.table.is_free(slot)
            return
        assert isinstance(message, OutputBatch)
        for output in message.outputs:
            client = self.clients[output.slot, output.generation]
            assert client.server == server
            assert client.finishes == [], "an output after the last"
            assert not client.is_released, "an output after the release"
            client.tokens += output.token_ids
            client.outputs.append(output)
            if output.finish_reason is not None:
                client.finishes.append(output.finish_reason)

    # --- clients ---

    def fill(self, prompt: list[int], server: int = 0, salt: bytes | None = None, **sampling) -> Client:
        """A filled slot that is not submitted."""
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
        slots = slots_of_server(self.table.num_slots, server, self.settings.num_servers)
        slot = next(slot for slot in slots if self.table.is_free(slot))
        root = HASHER.root(None, salt)
        tokens = np.array(prompt, np.uint32)
        generation = self.table.fill(slot, tokens, params, root, HASHER.chain(root, tokens))
        client = Client(slot, generation, server, list(prompt), params)
        self.clients[slot, generation] = client
        return client

    def submit(self, prompt: list[int], server: int = 0, priority: int = 0, **sampling) -> Client:
        client = self.fill(prompt, server, **sampling)
        self.router.turn([SubmitRequest(client.slot, client.generation, server, f"r{client.slot}", priority)])
        return client

    def submit_together(self, prompts: list[list[int]], **sampling) -> list[Client]:
        clients = [self.fill(prompt, **sampling) for prompt in prompts]
        self.router.turn([SubmitRequest(c.slot, c.generation, 0, f"r{c.slot}") for c in clients])
        return clients

    def abort(self, client: Client) -> None:
        self.router.turn([AbortRequest(client.slot, client.generation)])

    def finish(self, client: Client, num_accepted: int) -> None:
        self.router.turn([FinishRequest(client.slot, client.generation, num_accepted)])

    # --- time ---

    @property
    def is_busy(self) -> bool:
        return any(worker.plans for worker in self.workers)

    def step(self, rank: int = 0) -> None:
        """One rank runs its next plan, and the router hears of it."""
        result = self.workers[rank].run_next()
        self.clock.advance(0.01)
        self.router.turn([result])

    def step_all(self) -> None:
        """Every rank runs its next plan."""
        for worker in self.workers:
            if worker.plans:
                self.step(worker.rank)

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is in flight."""
        for _ in range(max_steps):
            if not self.is_busy:
                return
            self.step_all()
        raise AssertionError("the router does not come to rest")

    # --- checks ---

    @property
    def ledger(self):
        return self.router.engine.ledger

    def check(self) -> None:
        assert self.ledger.check_integrity() == []
        self.check_in_flight()

    def check_hit(self, join: JoinRow) -> None:
        """A hit has what every group needs for exactly its length; the workers check that it is the right thing."""
        length = join.num_cached // PAGE
        assert join.num_cached == length * PAGE < join.num_known
        for spec in specs_of(self.groups):
            first = join.first_places.get(spec.name, 0)
            if spec.has_checkpoints:
                assert (spec.name in join.restores) == (length > 0)
                assert len(join.pages[spec.name]) == 1
            else:
                assert first == (0 if spec.is_full else max(0, length - spec.window_pages))
                assert first + len(join.pages[spec.name]) > length

    def check_in_flight(self) -> None:
        """No page of a row that a plan in flight names has been given up."""
        for record in self.router.engine.pipeline._in_flight:
            for request in record.rows:
                if request is not None and request.last_step >= record.step:
                    assert request.holding is not None
                    for name, group in self.ledger.groups.items():
                        assert all(group.refs(page) > 0 for page in request.holding.references(name))

    def check_idle(self) -> None:
        """All ended, once; nothing leaked."""
        self.check()
        assert not self.router.has_work()
        assert not self.router.requests
        assert all(group.num_used == 0 for group in self.ledger.groups.values())
        assert not any(self.router.engine.planner._pages.growth.total.values())
        for client in self.clients.values():
            assert (client.is_released, len(client.finishes)) == (True, 1), client

    @property
    def longest(self) -> int:
        """Tokens that a request may have."""
        pools = [self.pool_sizes.get(s.name, self.num_pages) for s in specs_of(self.groups) if s.is_full]
        return min([self.settings.max_total_len, *(pages * PAGE for pages in pools)])

    def check_tokens(self, client: Client) -> None:
        limit = self.longest
        assert client.tokens == expected_tokens(client.prompt, client.sampling, limit)

    def close(self) -> None:
        self.table.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ by seed from the first on."""
    return [(seed * 7919 + position * 31 + seed) % VOCAB for position in range(length)]
