"""The router as a process: mailboxes, control plane and the launcher's pipe around `Router`."""

import logging
import time
from collections.abc import Iterable
from typing import Any

from serve.config import ResolvedConfig
from serve.ipc.channel import Inbox
from serve.ipc.child import ChildContext
from serve.ipc.control import ControlServer
from serve.ipc.messages import ChildReady, EngineUp, Message, StopChild
from serve.ipc.process_control import freeze_start_up
from serve.ipc.request_table import RequestTable
from serve.router.admin import RouterAdmin
from serve.router.cache_client import CacheClient, ProbePolicy
from serve.router.mail import ZmqMail
from serve.router.router import Router
from serve.router.settings import EngineFacts, RouterSettings

MAX_IDLE_S = 60.0

logger = logging.getLogger(__name__)


def router_settings(config: ResolvedConfig, model: dict[str, Any], epoch: int) -> RouterSettings:
    """The router's part of the configuration."""
    serve = config.serve
    return RouterSettings(
        epoch=epoch,
        page_size=config.page_size,
        num_ranks=serve.tp,
        max_rows=serve.running_max_req_size,
        batch_max_tokens=config.batch_max_tokens,
        chunked_prefill_size=config.chunked_prefill_size,
        max_total_len=config.max_req_total_len,
        max_queue_size=serve.max_queue_size,
        request_timeout_s=serve.request_timeout,
        step_timeout_s=serve.step_timeout,
        by_priority=serve.schedule_policy == "priority",
        eos_token_ids=frozenset(model.get("config", {}).get("eos_token_ids", ())),
        num_servers=serve.num_http_servers,
        num_layers=int(model.get("config", {}).get("num_layers", 0)),
        max_loading_fraction=serve.max_loading_fraction,
        stores_output=serve.cpu_cache_store_output,
        cache_is_sync=serve.cpu_cache_sync,
        loads_always=serve.cpu_cache_load_policy == "always",
        checkpoint_interval=serve.checkpoint_interval,
    )


class RouterProcess:
    """Waits for mail, control calls, the launcher or a deadline, and gives the router its turn. Never polls."""

    def __init__(self, context: ChildContext) -> None:
        config = context.config
        self._parent = context.parent
        self._inbox = Inbox(context.run_dir, f"router.{context.epoch}")
        self._table = RequestTable.attach(context.fds["table"])
        self._table.release_all()
        has_cache = config.serve.enable_cpu_cache
        servers = config.serve.num_http_servers
        self._mail = ZmqMail(context.run_dir, context.epoch, config.serve.tp, servers, has_cache)
        self._settings = router_settings(config, context.model, context.epoch)
        cache = CacheClient(self._mail.to_cache if has_cache else None, ProbePolicy())
        self.router = Router(self._settings, self._table, self._mail, cache, time.monotonic, time.thread_time)
        self._mail.statistics = self.router.statistics
        self._control = ControlServer(context.run_dir, "control-router", RouterAdmin(self.router).handlers())
        self._inbox.add_wakeup(self._parent.fileno())
        self._inbox.add_wakeup(self._control.fileno())
        self._stop_at: float | None = None
        self._parent.send(ChildReady("router", context.index, {}))

    def run(self) -> None:
        """Until StopChild has been obeyed. Raises StepTimeoutError, StartError, and whatever is a bug."""
        while not self._is_done():
            messages = self._inbox.receive(self._wait_s())
            self._control.run_pending()
            self.router.turn([*self._take_launcher_messages(), *messages])
        self.router.abort_all()
        self.router.turn([])

    def close(self) -> None:
        """Close sockets and the table."""
        self._control.close()
        self._inbox.close()
        self._mail.close()

    def _wait_s(self) -> float:
        deadlines = [d for d in (self.router.next_deadline(), self._stop_at) if d is not None]
        wait_s = min(deadlines) - time.monotonic() if deadlines else MAX_IDLE_S
        return min(max(wait_s, 0.001), MAX_IDLE_S)

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        return not self.router.has_work() or time.monotonic() >= self._stop_at

    def _take_launcher_messages(self) -> Iterable[Message]:
        """Those that are the router's own business; others end here."""
        rest: list[Message] = []
        for message in self._parent.receive():
            if isinstance(message, EngineUp):
                self.router.engine_up(EngineFacts.from_info(message.info, self._settings.page_size))
            elif isinstance(message, StopChild):
                self.router.intake.is_stopping = True
                self._stop_at = time.monotonic() + message.drain_s
            else:
                rest.append(message)
        return rest


def main(context: ChildContext) -> None:
    """Run the router until the launcher stops it."""
    process = RouterProcess(context)
    freeze_start_up()
    try:
        process.run()
    finally:
        process.close()
