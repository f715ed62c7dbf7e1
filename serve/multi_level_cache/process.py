"""The cache manager process: mailbox, the launcher's line, control socket and arena around a `CacheManager`."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from models.state_layout import StateLayout
from serve.config import ServeConfig
from serve.ipc.channel import ChannelFullError, Inbox, Outbox
from serve.ipc.child import ChildContext, StartError
from serve.ipc.control import ControlServer
from serve.ipc.messages import ChildReady, EngineDown, EngineUp, Message, StopChild
from serve.ipc.process_control import freeze_start_up
from serve.ipc.request_table import RequestTable
from serve.ipc.shm_segment import HEADER_BYTES, SegmentError
from serve.multi_level_cache.arena_growth import ArenaGrower
from serve.multi_level_cache.cache_manager import CacheManager
from serve.multi_level_cache.control import control_handlers
from serve.multi_level_cache.disabled import DisabledCacheManager
from serve.multi_level_cache.disk_directory import DiskDirectoryError
from serve.multi_level_cache.disk_room import CLOSE_DISK_S, DiskOptions
from serve.multi_level_cache.disk_tier import DiskTier
from serve.multi_level_cache.fault_injector import FaultInjector, parse_faults
from serve.multi_level_cache.faulty_tier import FaultyTier
from serve.multi_level_cache.host_arena import HostArena
from serve.multi_level_cache.host_tier import HostTier
from serve.multi_level_cache.object_format import ObjectFormat, object_formats
from serve.multi_level_cache.persist_policy import PersistPolicy, PersistRules
from serve.multi_level_cache.request_names import TableNames
from serve.multi_level_cache.secondary_tier import SecondaryTier

MAX_WAIT_S = 1.0

logger = logging.getLogger(__name__)


def main(context: ChildContext) -> None:
    """Serve until told to stop."""
    process = CacheProcess(context)
    freeze_start_up()
    try:
        process.run()
    finally:
        process.close()


def persist_rules(serve: ServeConfig) -> PersistRules:
    """Which pages are to go to disk."""
    policy = PersistPolicy(serve.disk_cache_policy) if serve.disk_cache_policy else PersistPolicy.WRITE_THROUGH
    return PersistRules(policy, serve.disk_cache_min_tokens)


class MailPost:
    """`Post` over mailboxes; those of the living engine group only."""

    def __init__(self, context: ChildContext) -> None:
        self._run_dir = context.run_dir
        self._epoch: int | None = None
        self._boxes: dict[str, Outbox] = {}

    def engine_up(self, epoch: int) -> None:
        """From now on messages go to this engine group."""
        self.close()
        self._epoch = epoch

    def to_router(self, epoch: int, message: Message) -> None:
        """To the router of an engine group; lost when that is not the living one."""
        self._send(epoch, f"router.{epoch}", message)

    def to_worker(self, epoch: int, rank: int, message: Message) -> None:
        """To one worker of an engine group; lost when that is not the living one."""
        self._send(epoch, f"pages-{rank}.{epoch}", message)

    def _send(self, epoch: int, name: str, message: Message) -> None:
        if epoch != self._epoch:
            return
        box = self._boxes.get(name)
        if box is None:
            box = self._boxes[name] = Outbox(self._run_dir, name)
        try:
            box.send(message)
        except ChannelFullError as error:
            logger.warning("a %s is lost: %s", type(message).__name__, error)

    def close(self) -> None:
        """Close all mailboxes."""
        self._epoch = None
        for box in self._boxes.values():
            box.close()
        self._boxes.clear()


class CacheProcess:
    """One thread: receives, dispatches by type, answers."""

    def __init__(self, context: ChildContext) -> None:
        self._context = context
        self._parent = context.parent
        self._post = MailPost(context)
        self._grower: ArenaGrower | None = None
        self._disk: DiskTier | None = None
        rules = parse_faults(context.config.serve.fault_inject)
        self._faults = FaultInjector(rules) if rules else None
        try:
            self._manager, handlers = self._make_manager()
        except (SegmentError, DiskDirectoryError, OSError) as error:
            raise StartError(str(error)) from error
        self._inbox = Inbox(context.run_dir, "cache")
        self._is_running = True
        self._manager_status = handlers["status"]
        self._control = ControlServer(context.run_dir, "control-cache", {**handlers, "status": self._status})
        self._inbox.add_wakeup(self._parent.fileno())
        self._inbox.add_wakeup(self._control.fileno())
        if self._grower is not None:
            self._inbox.add_wakeup(self._grower.fileno())
            self._grower.start()
        if self._disk is not None:
            self._inbox.add_wakeup(self._disk.fileno())
        self._launcher_handlers: dict[type[Message], Callable[[Any], None]] = {
            EngineUp: self._on_engine_up,
            EngineDown: self._on_engine_down,
            StopChild: self._on_stop,
        }

    def _make_manager(self) -> tuple[CacheManager | DisabledCacheManager, dict[str, Callable[..., Any]]]:
        """The manager and its control methods. Raises SegmentError."""
        fds = self._context.fds
        table = RequestTable.attach(fds["table"], read_only=True)
        names = TableNames(table, table.shape.num_slots)
        if "arena" not in fds:
            disabled = DisabledCacheManager(names, self._post)
            return disabled, disabled.control_handlers()
        arena = HostArena.attach(fds["arena"], fds["arena_header"])
        num_starts = arena.begin_management()
        layout = msgspec.convert(self._context.model["layout"], StateLayout)
        host = HostTier.build(arena, object_formats(layout), num_starts, time.monotonic)
        self._grower = ArenaGrower(arena.payload_fd, HEADER_BYTES, arena.shape.payload_bytes)
        tier = self._make_tier(list(host.formats.values()))
        rules = persist_rules(self._context.config.serve)
        if self._faults is None:
            manager = CacheManager(host, names, self._post, num_starts, tier, rules=rules)
            return manager, control_handlers(manager)
        manager = CacheManager(host, names, self._post, num_starts, tier, self._faults.reach, rules)
        return manager, {**control_handlers(manager), "inject": self._faults.arm}

    def _make_tier(self, formats: list[ObjectFormat]) -> SecondaryTier | None:
        """The disk tier, if there is one. Raises DiskDirectoryError, OSError."""
        config = self._context.config
        if config.disk_cache_dir is None:
            return None
        faults = self._faults
        self._disk = DiskTier(DiskOptions(config.disk_cache_dir, config.disk_cache_bytes), formats, faults=faults)
        return FaultyTier(self._disk, faults) if faults is not None else self._disk

    def run(self) -> None:
        """Tell the launcher that it answers, then answer."""
        self._parent.send(ChildReady(self._context.role, self._context.index, {}))
        while self._is_running:
            self._handle_all(self._inbox.receive(self._wait_s()))
            self._grow()
            self._manager.tick()
            self._control.run_pending()

    def _handle_all(self, messages: list[Message]) -> None:
        """Everything that has come, so that no deadline passes while the Begin that keeps it lies in the mailbox."""
        while True:
            # The launcher first: an EngineUp must be known before the first message of its epoch.
            for message in self._parent.receive():
                self._launcher_handlers.get(type(message), self._on_unknown)(message)
            for message in messages:
                self._manager.handle(message)
            messages = self._inbox.receive(0)
            if not messages:
                return

    def _wait_s(self) -> float:
        deadline = self._manager.next_deadline()
        return MAX_WAIT_S if deadline is None else min(max(deadline - time.monotonic(), 0.0), MAX_WAIT_S)

    def _grow(self) -> None:
        growth = self._grower.poll_finished() if self._grower is not None else None
        if growth is None or not isinstance(self._manager, CacheManager):
            return
        self._manager.grow(growth)
        if growth.reason is not None:
            logger.warning("%s", growth.reason)

    def close(self) -> None:
        """Give everything back."""
        self._control.close()
        self._inbox.close()
        self._post.close()
        if self._grower is not None:
            self._grower.close()
        if self._faults is not None:
            self._faults.release()
        if self._disk is not None:
            self._disk.close(CLOSE_DISK_S)

    def _on_unknown(self, message: Message) -> None:
        logger.warning("no handler for %s", type(message).__name__)

    def _on_engine_up(self, message: EngineUp) -> None:
        self._post.engine_up(message.epoch)
        if self._disk is not None:
            self._disk.serve_namespace(bytes.fromhex(str(message.info["namespace"])))
        if isinstance(self._manager, DisabledCacheManager):
            groups = message.info.get("groups")
            self._manager.groups = [str(group["name"]) for group in groups] if isinstance(groups, list) else []
        self._manager.engine_up(message.epoch, self._context.config.serve.tp)

    def _on_engine_down(self, message: EngineDown) -> None:
        self._manager.engine_down(message.epoch)
        self._post.close()

    def _on_stop(self, message: StopChild) -> None:
        self._is_running = False

    def _status(self) -> dict[str, Any]:
        return {
            **self._manager_status(),
            "epoch": self._manager.epoch,
            "num_malformed": self._inbox.num_malformed,
            "restarts": self._context.restarts,
            "has_torch": "torch" in sys.modules,
        }
