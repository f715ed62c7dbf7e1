"""The router: takes messages, owns requests, sends plans. One thread, no I/O of its own, no clock of its own."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from serve.ipc.messages import (
    AbortRequest,
    CacheDown,
    CacheUp,
    FinishRequest,
    JobAnswer,
    Message,
    ProbeReply,
    ServerDown,
    StepResult,
    SubmitRequest,
)
from serve.router.cache_client import CacheClient
from serve.router.engine import Engine
from serve.router.lifecycle import Lifecycle, Table
from serve.router.outputs import Outputs
from serve.router.request import Request, RequestKey
from serve.router.results import ResultReader, name_pages
from serve.router.settings import EngineFacts, RouterSettings
from serve.router.statistics import RouterStatistics
from serve.types import FinishReason, RequestStatus

logger = logging.getLogger(__name__)


class StepTimeoutError(Exception):
    """A plan has no result for too long: the engine group must be restarted."""


class Mail(Protocol):
    """Ways out. `to_workers` raises when a worker cannot take a plan; `to_server` never does."""

    def to_workers(self, message: Message) -> None: ...
    def to_server(self, server: int, message: Message) -> None: ...


class Router:
    """Owner of request status. `turn` does all: handle what came, send plans, send outputs."""

    def __init__(
        self,
        settings: RouterSettings,
        table: Table,
        mail: Mail,
        cache: CacheClient,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
    ) -> None:
        self.statistics = RouterStatistics()
        self.engine: Engine | None = None
        self.is_stopping = False
        self._settings = settings
        self._table = table
        self._mail = mail
        self._cache = cache
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._outputs = Outputs()
        self._living = Lifecycle(settings.page_size, table, cache, self._outputs, self.statistics)
        self._reader: ResultReader | None = None
        self._early: list[SubmitRequest] = []
        self._deadlines: deque[tuple[float, RequestKey]] = deque()  # of requests, in order
        self._order = 0
        self._handlers: dict[type[Message], Callable[..., None]] = {
            SubmitRequest: self._submit,
            FinishRequest: self._finish_early,
            AbortRequest: self._abort,
            StepResult: self._take_result,
            JobAnswer: self._take_job_answer,
            ProbeReply: self._take_probe_reply,
            ServerDown: self._server_down,
            CacheDown: self._cache_down,
            CacheUp: self._cache_up,
        }

    @property
    def requests(self) -> dict[int, Request]:
        """Living requests by slot."""
        return self._living.requests

    # --- what the process calls ---

    def turn(self, messages: Iterable[Message]) -> None:
        """Handle messages, then send the next plans, then what the HTTP processes are owed."""
        began = self._cpu_clock()
        for message in messages:
            handler = self._handlers.get(type(message))
            if handler is None:
                logger.warning("dropped an unexpected %s", type(message).__name__)
            else:
                handler(message)
        now = self._clock()
        self._check_deadlines(now)
        self._send_plans(now)
        self._outputs.flush(self._mail.to_server)
        self.statistics.router_cpu_s += self._cpu_clock() - began

    def engine_up(self, facts: EngineFacts) -> None:
        """Begin to schedule; requests that came before are taken now."""
        self.engine = self._living.engine = Engine.build(self._settings, facts, self.statistics)
        self._reader = ResultReader(
            self.engine.planner, facts.hasher, self._outputs, self.statistics, self._living.finish, self._living.fail
        )
        early, self._early = self._early, []
        self.turn(early)

    def next_deadline(self) -> float | None:
        """When `turn` must run although nothing comes."""
        deadlines = [self._cache.next_deadline(), self._deadlines[0][0] if self._deadlines else None]
        if self.engine is not None:
            if self.engine.pipeline.has_room:  # otherwise a result must come first
                deadlines.append(self.engine.planner.hold_deadline)
            if (started := self.engine.pipeline.started_at()) is not None:
                deadlines.append(started + self._settings.step_timeout_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def now(self) -> float:
        """The router's clock."""
        return self._clock()

    def abort_all(self) -> None:
        """End every request; they are released as their plans end."""
        for request in self.requests.values():
            self._living.end(request, FinishReason.ABORT)

    def has_work(self) -> bool:
        """True while a request lives or a plan is in flight."""
        return bool(self.requests) or bool(self.engine is not None and len(self.engine.pipeline))

    # --- messages from HTTP processes ---

    def _submit(self, message: SubmitRequest) -> None:
        key = RequestKey(message.slot, message.generation)
        if self._table.generation(key.slot) != key.generation or self._live(message) is not None:
            self.statistics.num_stale += 1
            return
        if self.engine is None:
            self._early.append(message)
            return
        self.statistics.num_submitted += 1
        refusal = self._refuse(self.engine, key)
        if refusal is not None:
            self.statistics.num_refused += 1
            self._outputs.refuse(message.server, key, *refusal)
            self._living.release_slot(message.server, key)
            return
        request = self._make_request(self.engine, message, key)
        self.requests[key.slot] = request
        self.engine.queue.add(request)
        self._deadlines.append((request.arrival + self._settings.request_timeout_s, key))
        self.statistics.num_prompt_tokens += request.num_prompt
        self._look_up(request)

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
            request.advance(RequestStatus.LOOKING_UP)

    def _finish_early(self, message: FinishRequest) -> None:
        """Of a request that a stop string ended, only pages of accepted tokens stay in the index."""
        request = self._live(message)
        if request is None or self.engine is None:
            return
        num_kept = request.num_prompt + max(0, min(message.num_accepted, request.num_generated))
        self.engine.planner.forget_pages(request, num_kept // self._settings.page_size, even_if_shared=False)
        if not request.is_ended:
            self.engine.admission.estimate.finished(message.num_accepted, request.limit - request.num_prompt)
            self._living.end(request, FinishReason.STOP)

    def _abort(self, message: AbortRequest) -> None:
        request = self._live(message)
        if request is not None:
            self._living.end(request, FinishReason.ABORT)
        self._drop_early(lambda early: (early.slot, early.generation) == (message.slot, message.generation))

    def _server_down(self, message: ServerDown) -> None:
        for request in [r for r in self.requests.values() if r.server == message.server]:
            self._living.end(request, FinishReason.ABORT, is_heard=False)
        self._drop_early(lambda early: early.server == message.server)

    def _drop_early(self, is_dropped: Callable[[SubmitRequest], bool]) -> None:
        for early in filter(is_dropped, list(self._early)):
            self._early.remove(early)
            self._living.release_slot(early.server, RequestKey(early.slot, early.generation))

    def _live(self, message: SubmitRequest | FinishRequest | AbortRequest) -> Request | None:
        return self._living.get(RequestKey(message.slot, message.generation))

    # --- messages from workers and the cache manager ---

    def _take_result(self, result: StepResult) -> None:
        engine, reader = self.engine, self._reader
        if engine is None or reader is None or result.epoch != self._settings.epoch:
            return
        engine.pipeline.take(result)
        now = self._clock()
        while (record := engine.pipeline.pop_ended(now)) is not None:
            self.statistics.num_steps += 1
            self.statistics.step_s.observe(record.compute_s)
            engine.costs.observe(record.num_prefill_tokens, record.num_decode_rows, record.compute_s, now)
            if record.result is not None:
                reader.apply(record, record.result, now)
            self._take_departed(engine)

    def _take_departed(self, engine: Engine) -> None:
        for request in engine.planner.pop_departed():
            if not request.is_ended:  # its last token was due with a plan that has ended
                self._living.fail(request, "the engine gave no token")

    def _take_job_answer(self, answer: JobAnswer) -> None:
        if self.engine is None:
            return
        end = self.engine.ledger.end_job(answer.job, answer.rank, answer.result)
        if end is not None:
            for request in self.requests.values():
                request.jobs.discard(end.job)

    def _take_probe_reply(self, reply: ProbeReply) -> None:
        request = self._cache.take(reply)
        if request is not None:
            request.found = reply
            request.advance(RequestStatus.QUEUED)

    def _cache_down(self, message: CacheDown) -> None:
        for request in self._cache.manager_down():
            request.advance(RequestStatus.QUEUED)
        for request in self.requests.values():
            request.found = None

    def _cache_up(self, message: CacheUp) -> None:
        self._cache.manager_up()

    # --- time and plans ---

    def _check_deadlines(self, now: float) -> None:
        for request in self._cache.pop_expired(now):
            request.advance(RequestStatus.QUEUED)
        self._end_overdue(now)
        started = self.engine.pipeline.started_at() if self.engine is not None else None
        if started is not None and now - started >= self._settings.step_timeout_s:
            raise StepTimeoutError(f"a step has no result after {now - started:.1f} s")

    def _end_overdue(self, now: float) -> None:
        timeout_s = self._settings.request_timeout_s
        while self._deadlines:
            deadline, key = self._deadlines[0]
            request = self._living.get(key)
            if request is not None and not request.is_ended:
                if deadline > now:
                    return
                self._living.end(request, FinishReason.ERROR, f"the request took longer than {timeout_s:g} s", 504)
            self._deadlines.popleft()

    def _send_plans(self, now: float) -> None:
        engine = self.engine
        if engine is None:
            return
        self._take_departed(engine)
        self._living.release_drained()
        while engine.pipeline.has_room and engine.planner.next_plan(self._mail.to_workers, now):
            self._take_departed(engine)
            self._living.release_drained()
