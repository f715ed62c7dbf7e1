"""The cache manager process: its mailbox, the launcher's line and the control socket around a `CacheManager`."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from serve.ipc.channel import ChannelFullError, Inbox, Outbox
from serve.ipc.child import ChildContext, StartError
from serve.ipc.control import ControlServer
from serve.ipc.messages import ChildReady, EngineDown, EngineUp, Message, Probe, StopChild
from serve.ipc.request_table import RequestTable
from serve.ipc.shm_segment import SegmentError
from serve.multi_level_cache.cache_manager import CacheManager

logger = logging.getLogger(__name__)


def main(context: ChildContext) -> None:
    """Serve until told to stop."""
    process = CacheProcess(context)
    try:
        process.run()
    finally:
        process.close()


class CacheProcess:
    """One thread: receives, dispatches by type, answers."""

    def __init__(self, context: ChildContext) -> None:
        self._context = context
        self._parent = context.parent
        try:
            self._manager = CacheManager(RequestTable.attach(context.fds["table"], read_only=True))
        except SegmentError as error:
            raise StartError(str(error)) from error
        self._inbox = Inbox(context.run_dir, "cache")
        self._router: Outbox | None = None
        self._is_running = True
        self._control = ControlServer(
            context.run_dir,
            "control-cache",
            {"status": self._status, "statistics": self._manager.statistics, "check": self._manager.check},
        )
        self._inbox.add_wakeup(self._parent.fileno())
        self._inbox.add_wakeup(self._control.fileno())
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            Probe: self._on_probe,
            EngineUp: self._on_engine_up,
            EngineDown: self._on_engine_down,
            StopChild: self._on_stop,
        }

    def run(self) -> None:
        """Tell the launcher that it answers, then answer."""
        self._parent.send(ChildReady(self._context.role, self._context.index, {}))
        while self._is_running:
            messages = self._inbox.receive(None)
            # The launcher first: an EngineUp must be known before the first message of its epoch.
            for message in (*self._parent.receive(), *messages):
                self._dispatch(message)
            self._control.run_pending()

    def close(self) -> None:
        """Give everything back."""
        self._control.close()
        self._inbox.close()
        if self._router is not None:
            self._router.close()

    def _dispatch(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.warning("no handler for %s", type(message).__name__)
        else:
            handler(message)

    def _on_probe(self, probe: Probe) -> None:
        reply = self._manager.probe(probe)
        if reply is None or self._router is None:
            return
        try:
            self._router.send(reply)
        except ChannelFullError as error:
            logger.warning("a probe's answer is lost: %s", error)

    def _on_engine_up(self, message: EngineUp) -> None:
        groups = message.info.get("groups")
        names = [str(group["name"]) for group in groups] if isinstance(groups, list) else []
        self._manager.engine_up(message.epoch, names)
        self._connect_router(message.epoch)

    def _connect_router(self, epoch: int) -> None:
        if self._router is not None:
            self._router.close()
        self._router = Outbox(self._context.run_dir, f"router.{epoch}")

    def _on_engine_down(self, message: EngineDown) -> None:
        self._manager.engine_down(message.epoch)
        if self._router is not None and message.epoch == self._manager.epoch:
            self._router.close()
            self._router = None

    def _on_stop(self, message: StopChild) -> None:
        self._is_running = False

    def _status(self) -> dict[str, Any]:
        return {
            "epoch": self._manager.epoch,
            "groups": self._manager.groups,
            "num_malformed": self._inbox.num_malformed,
            "restarts": self._context.restarts,
            "has_torch": "torch" in sys.modules,
        }
