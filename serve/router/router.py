"""The router: takes messages, owns requests, sends plans. One thread, no I/O of its own, no clock of its own."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from serve.ipc.messages import (
    AbortRequest,
    CacheDown,
    CacheUp,
    FinishRequest,
    Message,
    ServerDown,
    StepResult,
    SubmitRequest,
)
from serve.router.cache_client import CacheClient
from serve.router.engine import Engine
from serve.router.intake import Intake
from serve.router.ledger import FlushReport
from serve.router.lifecycle import Lifecycle, Table
from serve.router.outputs import Outputs
from serve.router.request import Request
from serve.router.results import ResultReader
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
        self._settings = settings
        self._table = table
        self._mail = mail
        self._cache = cache
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._outputs = Outputs()
        self._living = Lifecycle(settings.page_size, table, cache, self._outputs, self.statistics)
        self._reader: ResultReader | None = None
        self.intake = Intake(settings, table, cache, self._outputs, self._living, self.statistics, clock)
        self._handlers: dict[type[Message], Callable[..., None]] = {
            SubmitRequest: self.intake.submit,
            FinishRequest: self.intake.finish_early,
            AbortRequest: self.intake.abort,
            StepResult: self._take_result,
            ServerDown: self.intake.server_down,
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
        self.engine = self._living.engine = Engine.build(
            self._settings, facts, self._cache, self._mail.to_workers, self._clock, self.statistics
        )
        self._handlers.update(self.engine.tiers.handlers())
        self._reader = ResultReader(
            self.engine.planner, facts.hasher, self._outputs, self.statistics, self._living.finish, self._living.fail
        )
        self.turn(self.intake.take_early())

    def next_deadline(self) -> float | None:
        """When `turn` must run although nothing comes."""
        deadlines = [self._cache.next_deadline(), self.intake.deadlines[0][0] if self.intake.deadlines else None]
        if self.engine is not None:
            if self.engine.pipeline.has_room:  # otherwise a result must come first
                deadlines.append(self.engine.planner.hold_deadline)
            deadlines.append(self.engine.tiers.next_deadline())
            started = self.engine.pipeline.started_at(), self.engine.tiers.jobs.oldest_sent_at()
            deadlines += [since + self._settings.step_timeout_s for since in started if since is not None]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def now(self) -> float:
        """The router's clock."""
        return self._clock()

    def abort_all(self) -> None:
        """End every request; they are released as their plans end."""
        for request in self.requests.values():
            self._living.end(request, FinishReason.ABORT)

    def flush(self, quiet_s: float = 0.0, root: bytes | None = None) -> FlushReport | None:
        """Drop every cached page of the device, and ask nothing of the tiers below for `quiet_s` seconds.

        No page of before is hit from now on; requests that run finish with theirs. root: of pages under it only.
        None, and nothing is promised, while no engine is up: one that comes up meanwhile may ask the tiers.
        """
        if self.engine is None:
            return None
        for request in [each for each in self.requests.values() if root is None or each.root == root]:
            request.found = None
            self.engine.planner.flush(request)
            if request.status is RequestStatus.LOOKING_UP:
                self._cache.cancel(request)
                request.advance(RequestStatus.QUEUED)
        self._cache.close_until(self._clock() + quiet_s)
        self.engine.tiers.flush(root)
        return self.engine.ledger.flush(root)

    def open_tiers(self) -> None:
        """End the quiet of a flush."""
        self._cache.close_until(0.0)

    def has_work(self) -> bool:
        """True while a request lives or a plan is in flight."""
        return bool(self.requests) or (self.engine is not None and len(self.engine.pipeline) > 0)

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
            engine.planner.plan_ended(record)
            engine.costs.observe(record.num_prefill_tokens, record.num_decode_rows, record.compute_s, now)
            if record.result is not None:
                reader.apply(record, record.result, now)
                engine.tiers.computed(record.chunks, now)
            self._take_departed(engine)

    def _take_departed(self, engine: Engine) -> None:
        for request in engine.planner.pop_departed():
            if request.status is RequestStatus.PREEMPTED:
                self.intake.look_up_again(request, self._clock())
            elif not request.is_ended:  # its last token was due with a plan that has ended
                self._living.fail(request, "the engine gave no token")

    def _cache_down(self, message: CacheDown) -> None:
        for request in self._cache.manager_down():
            request.advance(RequestStatus.QUEUED)
        if self.engine is not None:
            self.engine.tiers.manager_down()
        for request in self.requests.values():
            request.found, request.stored = None, {}

    def _cache_up(self, message: CacheUp) -> None:
        self._cache.manager_up()

    # --- time and plans ---

    def _check_deadlines(self, now: float) -> None:
        for request in self._cache.pop_expired(now):
            request.advance(RequestStatus.QUEUED)
            self.statistics.tiers.num_lookups_late += 1
        self.intake.end_overdue(now)
        if self.engine is None:
            return
        self.engine.tiers.check_deadlines(now)
        self._check_progress(self.engine.pipeline.started_at(), "step", now)
        self._check_progress(self.engine.tiers.jobs.oldest_sent_at(), "load or store", now)

    def _check_progress(self, since: float | None, what: str, now: float) -> None:
        if since is not None and now - since >= self._settings.step_timeout_s:
            raise StepTimeoutError(f"a {what} has no result after {now - since:.1f} s")

    def _send_plans(self, now: float) -> None:
        engine = self.engine
        if engine is None:
            return
        self._take_departed(engine)
        self._living.release_drained()
        engine.planner.start_loads(now)
        while engine.pipeline.has_room and engine.planner.next_plan(self._mail.to_workers, now):
            self._take_departed(engine)
            self._living.release_drained()
