"""The cache manager of a server without a CPU cache: everything is a miss."""

from collections.abc import Callable
from typing import Any

from serve.ipc.messages import Acquire, AcquireReply, Claim, ClaimReply, Message, Probe, ProbeReply
from serve.multi_level_cache.cache_manager import NO_EPOCH, Post
from serve.multi_level_cache.request_names import NameSource
from serve.types import AcquireOutcome


class DisabledCacheManager:
    """Answers as `CacheManager` with an empty tier would, and keeps nothing. groups: as the engine names them."""

    def __init__(self, names: NameSource, post: Post) -> None:
        self.epoch = NO_EPOCH
        self.groups: list[str] = []
        self._names = names
        self._post = post
        self._counts = {"num_probes": 0, "num_stale_probes": 0, "num_pages_asked": 0}

    def handle(self, message: Message) -> None:
        """One message from the router or a worker."""
        if isinstance(message, Probe):
            self._probe(message)
        elif isinstance(message, Acquire):
            reply = AcquireReply(message.job, AcquireOutcome.MISSING, missing=message.ranges)
            self._post.to_router(message.job.epoch, reply)
        elif isinstance(message, Claim):
            num_pages = sum(pages.count for pages in message.ranges)
            self._post.to_router(message.job.epoch, ClaimReply(message.job, [], num_refused=num_pages))

    def _probe(self, probe: Probe) -> None:
        self._counts["num_probes"] += 1
        names = self._names.read(probe.slot, probe.generation)
        if names is None:
            self._counts["num_stale_probes"] += 1
            return
        num_pages = len(names.names[: probe.num_pages])
        self._counts["num_pages_asked"] += num_pages
        misses = {group: bytes(-(-num_pages // 8)) for group in self.groups}
        self._post.to_router(self.epoch, ProbeReply(probe.probe_id, misses, dict(misses)))

    def engine_up(self, epoch: int, num_ranks: int) -> None:
        """An engine group answers."""
        self.epoch = max(self.epoch, epoch)

    def engine_down(self, epoch: int) -> None:
        """Nothing is held."""

    def tick(self) -> None:
        """Nothing has deadlines."""

    def next_deadline(self) -> float | None:
        """Never."""
        return None

    def control_handlers(self) -> dict[str, Callable[..., Any]]:
        """Methods for the control server."""
        return {
            "status": lambda: {"is_enabled": False, "groups": self.groups},
            "statistics": lambda: dict(self._counts),
            "ls": lambda limit=100, root=None: [],
            "check": list,
            "flush": lambda root=None: {"dropped": 0, "lower_dropped": 0, "leaving": 0},
            "leaving": lambda: {"leaving": 0},
        }
