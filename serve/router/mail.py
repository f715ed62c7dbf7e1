"""The router's ways out over ZeroMQ."""

import logging
from pathlib import Path

from serve.ipc.channel import ChannelFullError, Outbox
from serve.ipc.messages import Message, StepPlan
from serve.router.statistics import RouterStatistics

logger = logging.getLogger(__name__)


class ZmqMail:
    """Outboxes to all workers, HTTP processes and the cache manager. Belongs to the router's thread."""

    def __init__(self, run_dir: Path, epoch: int, num_ranks: int, num_servers: int, has_cache: bool) -> None:
        self.statistics: RouterStatistics | None = None
        self._plans = [Outbox(run_dir, f"worker-{rank}.{epoch}") for rank in range(num_ranks)]
        self._pages = [Outbox(run_dir, f"pages-{rank}.{epoch}") for rank in range(num_ranks)]
        self._servers = [Outbox(run_dir, f"http-{index}") for index in range(num_servers)]
        self._cache = Outbox(run_dir, "cache") if has_cache else None

    def to_workers(self, message: Message) -> None:
        """To every rank, page jobs past the plans that wait; raises ChannelFullError: ranks that miss one are lost."""
        for outbox in self._plans if isinstance(message, StepPlan) else self._pages:
            outbox.send(message)

    def to_server(self, server: int, message: Message) -> None:
        """To an HTTP process; one that does not read, or does not exist, loses the message."""
        if not 0 <= server < len(self._servers):
            return
        try:
            self._servers[server].send(message)
        except ChannelFullError:
            if self.statistics is not None:
                self.statistics.num_lost_sends += 1
            logger.warning("HTTP process %d does not read; a %s is lost", server, type(message).__name__)

    def to_cache(self, message: Message) -> bool:
        """To the cache manager; False when there is none, or it does not read."""
        if self._cache is None:
            return False
        try:
            self._cache.send(message)
        except ChannelFullError:
            return False
        return True

    def close(self) -> None:
        """Close all outboxes."""
        for outbox in (*self._plans, *self._pages, *self._servers, *filter(None, [self._cache])):
            outbox.close()
