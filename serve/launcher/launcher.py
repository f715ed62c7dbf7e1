"""The launcher process: brings a server up, keeps it up, and takes it down."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from serve.config import ResolvedConfig
from serve.ipc.control import ControlServer
from serve.ipc.messages import (
    CacheDown,
    CacheUp,
    ChildFailed,
    ChildReady,
    EngineDown,
    EngineUp,
    Message,
    Progress,
    ServerDown,
)
from serve.ipc.request_table import RequestTable, TableShape
from serve.launcher.arena import arena_fds, count_tier_pages, make_arena, make_key
from serve.launcher.child_process import ChildProcess, ChildSpec, ChildStatus
from serve.launcher.children import Children
from serve.launcher.engine_group import ENGINE_ROLES, EngineGroup, EngineState
from serve.launcher.engine_info import EngineFacts, engine_up_info, merge_answers
from serve.launcher.events import EventLoop
from serve.launcher.http_socket import open_to_clients, url_of
from serve.launcher.model_facts import ModelFacts
from serve.launcher.progress import ProgressReporter
from serve.launcher.restart_policy import RestartPolicy
from serve.launcher.service import Service
from serve.launcher.start_summary import format_summary, worker_phases
from serve.launcher.stop import kill_all, stop_in_order

# Rows beyond the longest request, for tokens that a step computes ahead.
SPARE_TOKENS = 16
TICK_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """Everything that is settled before a process is spawned. roles: role -> module; phases: seconds so far."""

    config: ResolvedConfig
    model: ModelFacts
    roles: Mapping[str, str]
    listener: socket.socket
    phases: dict[str, float]


class Launcher:
    """Owns all children and shared memory of one server. One thread, one event loop; `run` until told to stop."""

    def __init__(self, launch: Launch, events: EventLoop) -> None:
        self._launch = launch
        self._config = launch.config
        self._events = events
        self._key = make_key(self._config)
        self._url = url_of(launch.listener, self._config.serve.host)
        self._started_at = time.monotonic()
        self._is_serving = False
        self._is_stopping = False
        self._facts: EngineFacts | None = None
        self._engine_up: EngineUp | None = None
        self._progress = ProgressReporter()
        self._table = RequestTable.create(
            TableShape(self._config.num_slots, self._config.max_req_total_len + SPARE_TOKENS, self._config.page_size)
        )
        self._handlers: dict[type[Message], Callable[[ChildProcess, Any], None]] = {
            ChildReady: self._on_ready,
            ChildFailed: self._on_failed,
            Progress: self._on_progress,
        }
        self._arena = make_arena(self._config, launch.model)
        config_json = self._config.model_dump_json().encode()
        model = launch.model.describe(self._config)
        self._children = Children(events, config_json, model, self._on_message, self._on_end)
        timeout_s = self._config.serve.start_timeout
        self._engine = EngineGroup(self._children, self._engine_specs, self, timeout_s, RestartPolicy())
        self._servers = [
            Service(self._children, self._make_spec("httpserver", index), timeout_s, RestartPolicy())
            for index in range(self._config.serve.num_http_servers)
        ]
        self._cache = Service(self._children, self._make_spec("cache", 0), timeout_s, RestartPolicy())
        self._services = [self._cache, *self._servers]

    # --- the life of the server --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, serve until SIGINT or SIGTERM, stop in order. Raises LaunchError after killing all children."""
        with ExitStack() as stack:
            stack.callback(self._table.close)
            if self._arena is not None:
                stack.callback(self._arena.close)
            stack.callback(self._progress.close)
            control = ControlServer(self._config.run_dir, "control-launcher", self._control_handlers())
            stack.callback(control.close)
            self._events.watch(control, control.run_pending)
            try:
                self._start()
                while not self._events.num_stops:
                    self._pump()
                self._stop()
            finally:
                self._is_stopping = True
                kill_all(self._events, self._children)

    def _start(self) -> None:
        now = time.monotonic()
        self._engine.start(now)
        for service in self._services:
            service.start(now)
        while not self._is_settled():
            self._pump()
            if self._events.num_stops:
                return
        self._is_serving = True
        self._progress.close()
        assert self._facts is not None
        workers = self._children.living("worker")
        phases = self._launch.phases | worker_phases(workers) | {"all processes": time.monotonic() - now}
        tier_pages = count_tier_pages(self._arena, self._config, self._launch.model)
        print(format_summary(self._config, self._facts, workers, tier_pages, phases, self._url), flush=True)

    def _pump(self) -> None:
        self._events.run_once(TICK_S if self._is_settled() else TICK_S / 10)
        self._children.reap()
        now = time.monotonic()
        self._engine.tick(now)
        for service in self._services:
            service.tick(now)

    def _is_settled(self) -> bool:
        """All that is to run is ready."""
        return self._engine.state is EngineState.UP and all(service.is_ready for service in self._services)

    def _stop(self) -> None:
        """Stop in order; a server that does not serve has nothing to drain."""
        self._is_stopping = True
        self._launch.listener.close()
        logger.info("stopping")
        if not self._is_serving:
            return
        drain_s = self._config.serve.drain_timeout if self._engine.state is EngineState.UP else 0.0
        stop_in_order(self._events, self._children, drain_s)

    # --- what to spawn -----------------------------------------------------------------------------------------------

    def _engine_specs(self, epoch: int, restarts: int) -> list[ChildSpec]:
        fds = {"table": self._table.fd}
        threads = self._config.threads_per_worker
        roles = self._launch.roles
        workers = [
            ChildSpec("worker", rank, epoch, roles["worker"], fds | arena_fds(self._arena), threads, restarts)
            for rank in range(self._config.serve.tp)
        ]
        return [*workers, ChildSpec("router", 0, epoch, roles["router"], fds, restarts=restarts)]

    def _make_spec(self, role: str, index: int) -> Callable[[int], ChildSpec]:
        def make(restarts: int) -> ChildSpec:
            fds = {"table": self._table.fd}
            if role == "httpserver":
                fds["listen"] = self._launch.listener.fileno()
            if role == "cache":
                fds |= arena_fds(self._arena)
            module = self._launch.roles[role]
            return ChildSpec(role, index, self._engine.epoch, module, fds, restarts=restarts)

        return make

    # --- what children say -------------------------------------------------------------------------------------------

    def _on_message(self, child: ChildProcess, message: Message) -> None:
        if self._is_stopping:
            return  # who has just become ready is being stopped
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.error("%s sent an unexpected %s", child.name, type(message).__name__)
        else:
            handler(child, message)

    def _on_ready(self, child: ChildProcess, message: ChildReady) -> None:
        now = time.monotonic()
        child.status, child.ready_at, child.info = ChildStatus.READY, now, message.info
        logger.debug("%s is ready after %.2f s", child.name, now - child.started_at)
        service = self._service_of(child)
        if service is None:
            self._engine.on_ready(child, now)
            return
        service.on_ready()
        if self._engine_up is not None:
            child.send(self._engine_up)
        if service is self._cache and service.restarts:
            self._children.send(CacheUp(service.restarts), "router")

    def _on_failed(self, child: ChildProcess, message: ChildFailed) -> None:
        child.failure = message.reason

    def _on_progress(self, child: ChildProcess, message: Progress) -> None:
        child.progress = message
        if not self._is_serving:
            self._progress.update(child.name, message.phase, message.done, message.total)

    def _on_end(self, child: ChildProcess) -> None:
        if self._is_stopping:
            return
        now = time.monotonic()
        service = self._service_of(child)
        if service is None:
            self._engine.on_end(child, now)
            return
        if service is self._cache:
            self._children.send(CacheDown(), "router")
        else:
            self._children.send(ServerDown(child.spec.index), "router")
        service.on_end(child, now)

    def _service_of(self, child: ChildProcess) -> Service | None:
        return next((service for service in self._services if service.child is child), None)

    # --- the engine's ups and downs ----------------------------------------------------------------------------------

    def engine_up(self, group: EngineGroup) -> None:
        """Tell the cache manager, the router and HTTP processes: each is known to those it answers before they ask."""
        workers = sorted(self._children.living("worker"), key=lambda child: child.spec.index)
        self._facts = merge_answers(self._config, self._launch.model, workers)
        info = engine_up_info(self._config, self._launch.model, self._facts, self._key)
        self._engine_up = EngineUp(group.epoch, info)
        open_to_clients(self._launch.listener)
        for role in ("cache", "router", "httpserver"):
            self._children.send(self._engine_up, role)
        logger.info("the engine of epoch %d is up", group.epoch)

    def engine_down(self, group: EngineGroup) -> None:
        """Tell HTTP processes and the cache manager, now that nobody of the group can touch memory any more."""
        self._engine_up = None
        self._children.send(EngineDown(group.epoch, group.reason), "httpserver", "cache")

    # --- control plane -----------------------------------------------------------------------------------------------

    def _control_handlers(self) -> dict[str, Callable[..., Any]]:
        return {"status": self._status, "children": self._list_children}

    def _status(self) -> dict[str, Any]:
        return {
            "state": self._engine.state.value,
            "is_serving": self._is_serving,
            "epoch": self._engine.epoch,
            "engine_restarts": self._engine.restarts,
            "last_failure": self._engine.reason,
            "url": self._url,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started_at,
            "has_torch": "torch" in sys.modules,
        }

    def _list_children(self) -> list[dict[str, Any]]:
        return [
            {
                "role": child.spec.role,
                "index": child.spec.index,
                "pid": child.pid,
                "epoch": child.spec.epoch if child.spec.role in ENGINE_ROLES else self._engine.epoch,
                "status": child.status.value,
                "restarts": child.spec.restarts,
            }
            for child in self._children.living()
        ]
