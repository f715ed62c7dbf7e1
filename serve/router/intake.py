"""The door: requests come in, and are ended early, by what HTTP processes say, or by the clock."""

from collections import deque
from collections.abc import Callable

from serve.ipc.messages import AbortRequest, FinishRequest, ServerDown, SubmitRequest
from serve.ipc.request_table import slots_of_server
from serve.router.cache_client import CacheClient
from serve.router.engine import Engine
from serve.router.lifecycle import Lifecycle, Table
from serve.router.outputs import Outputs
from serve.router.request import Request, RequestKey
from serve.router.results import name_pages
from serve.router.settings import RouterSettings
from serve.router.statistics import RouterStatistics
from serve.types import FinishReason, RequestStatus


class Intake:
    """Makes requests of filled slots, and gives back slots that never became one."""

    def __init__(
        self,
        settings: RouterSettings,
        table: Table,
        cache: CacheClient,
        outputs: Outputs,
        living: Lifecycle,
        statistics: RouterStatistics,
        clock: Callable[[], float],
    ) -> None:
        self.is_stopping = False
        self._settings = settings
        self._table = table
        self._cache = cache
        self._outputs = outputs
        self._living = living
        self._statistics = statistics
        self._clock = clock
        self._early: list[SubmitRequest] = []
        self.deadlines: deque[tuple[float, RequestKey]] = deque()  # of requests, in order
        self._order = 0

    def take_early(self) -> list[SubmitRequest]:
        """What was submitted before the engine was up."""
        early, self._early = self._early, []
        return early

    # --- messages from HTTP processes ---

    def submit(self, message: SubmitRequest) -> None:
        """A filled slot becomes a request, or is refused."""
        key, engine = RequestKey(message.slot, message.generation), self._living.engine
        if self._is_stale(key):
            self._statistics.num_stale += 1
            return
        if engine is None:
            self._early.append(message)
            return
        self._statistics.num_submitted += 1
        refusal = self._refuse(engine, key)
        if refusal is not None:
            self._statistics.num_refused += 1
            self._outputs.refuse(message.server, key, *refusal)
            self._living.release_slot(message.server, key)
            return
        request = self._make_request(engine, message, key)
        self._living.requests[key.slot] = request
        engine.queue.add(request)
        self.deadlines.append((request.arrival + self._settings.request_timeout_s, key))
        self._statistics.num_prompt_tokens += request.num_prompt
        self._look_up(request)

    def _is_stale(self, key: RequestKey) -> bool:
        """Another request has the slot, or this one has been taken, or released with its HTTP process."""
        if self._table.generation(key.slot) != key.generation or self._table.is_free(key.slot):
            return True
        return self._living.get(key) is not None

    def _refuse(self, engine: Engine, key: RequestKey) -> tuple[str, int] | None:
        if self.is_stopping:
            return "the server is stopping", 503
        refusal = engine.admission.refuse(
            self._table.num_prompt(key.slot), len(engine.queue), engine.batch.num_free_rows
        )
        return (refusal.error, refusal.code) if refusal is not None else None

    def _make_request(self, engine: Engine, message: SubmitRequest, key: RequestKey) -> Request:
        table, slot = self._table, key.slot
        sampling, num_prompt, tokens = table.sampling(slot), table.num_prompt(slot), table.tokens(slot)
        ends = frozenset() if sampling.ignore_eos else self._settings.eos_token_ids
        self._order += 1
        request = Request(
            key=key,
            server=message.server,
            request_id=message.request_id,
            priority=message.priority if self._settings.by_priority else 0,
            order=self._order,
            arrival=self._clock(),
            clock=self._clock,
            sampling=sampling,
            num_prompt=num_prompt,
            limit=min(engine.admission.total_limit(num_prompt, sampling.max_tokens), len(tokens)),
            tokens=tokens,
            root=table.root(slot),
            names=table.names(slot),
            stop_ids=ends | frozenset(sampling.stop_token_ids),
        )
        name_pages(request, engine.facts.hasher)
        return request

    def _look_up(self, request: Request) -> None:
        """Ask the cache manager; without an answer, or without one to ask, it is a miss."""
        usable = min(len(request.names), (request.num_prompt - 1) // self._settings.page_size)
        if not request.wants_prompt_logprobs and self._cache.ask(request, usable, request.arrival):
            self._statistics.tiers.num_lookups += 1
            request.advance(RequestStatus.LOOKING_UP)

    def look_up_again(self, request: Request, now: float) -> None:
        """A preempted request waits again: pages of its prompt that the device gives to others may be below by then."""
        usable = min(len(request.names), request.num_prompt // self._settings.page_size)
        usable = min(usable, (request.num_tokens - 1) // self._settings.page_size)
        if not request.wants_prompt_logprobs and self._cache.ask(request, usable, now):
            self._statistics.tiers.num_lookups += 1
            request.load_attempts, request.load_cap, request.load_wait_until = 0, None, 0.0
            request.advance(RequestStatus.LOOKING_UP)

    def finish_early(self, message: FinishRequest) -> None:
        """Of a request that a stop string ended, only pages of accepted tokens stay in the index."""
        request, engine = self._live(message), self._living.engine
        if request is None or engine is None:
            return
        num_kept = request.num_prompt + max(0, min(message.num_accepted, request.num_generated))
        engine.planner.forget_pages(request, num_kept // self._settings.page_size, even_if_shared=False)
        if not request.is_ended:
            engine.admission.estimate.finished(message.num_accepted, request.limit - request.num_prompt)
            self._living.end(request, FinishReason.STOP)

    def abort(self, message: AbortRequest) -> None:
        """The client has gone."""
        request = self._live(message)
        if request is not None:
            self._living.end(request, FinishReason.ABORT)
        self._drop_early(lambda early: (early.slot, early.generation) == (message.slot, message.generation))

    def server_down(self, message: ServerDown) -> None:
        """Its requests end unheard; slots that it had filled and not submitted come back."""
        for request in [r for r in self._living.requests.values() if r.server == message.server]:
            self._living.end(request, FinishReason.ABORT, is_heard=False)
        self._drop_early(lambda early: early.server == message.server)
        slots = slots_of_server(self._table.num_slots, message.server, self._settings.num_servers)
        for slot in slots:
            if slot not in self._living.requests and not self._table.is_free(slot):
                self._table.mark_released(slot, self._table.generation(slot))

    def _drop_early(self, is_dropped: Callable[[SubmitRequest], bool]) -> None:
        for early in filter(is_dropped, list(self._early)):
            self._early.remove(early)
            self._living.release_slot(early.server, RequestKey(early.slot, early.generation))

    def _live(self, message: SubmitRequest | FinishRequest | AbortRequest) -> Request | None:
        return self._living.get(RequestKey(message.slot, message.generation))

    # --- time ---

    def end_overdue(self, now: float) -> None:
        """End requests that have taken longer than anybody waits."""
        timeout_s = self._settings.request_timeout_s
        while self.deadlines:
            deadline, key = self.deadlines[0]
            request = self._living.get(key)
            if request is not None and not request.is_ended:
                if deadline > now:
                    return
                self._living.end(request, FinishReason.ERROR, f"the request took longer than {timeout_s:g} s", 504)
            self.deadlines.popleft()
