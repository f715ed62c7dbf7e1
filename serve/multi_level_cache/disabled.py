"""The cache manager of a server without a CPU cache: everything is a miss."""

from collections.abc import Callable
from typing import Any

from serve.ipc.messages import Acquire, AcquireReply, Claim, ClaimReply, Message, Probe, ProbeReply
from serve.multi_level_cache.cache_manager import NO_EPOCH, Post
from serve.types import AcquireOutcome


class DisabledCacheManager:
    """Answers as `CacheManager` with an empty tier would, and keeps nothing."""

    def __init__(self, post: Post) -> None:
        self.epoch = NO_EPOCH
        self._post = post

    def handle(self, message: Message) -> None:
        """One message from the router or a worker."""
        if isinstance(message, Probe):
            self._post.to_router(self.epoch, ProbeReply(message.probe_id, {}, {}))
        elif isinstance(message, Acquire):
            reply = AcquireReply(message.job, AcquireOutcome.MISSING, missing=message.ranges)
            self._post.to_router(message.job.epoch, reply)
        elif isinstance(message, Claim):
            num_pages = sum(pages.count for pages in message.ranges)
            self._post.to_router(message.job.epoch, ClaimReply(message.job, [], num_refused=num_pages))

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
            "status": lambda: {"enabled": False, "epoch": self.epoch},
            "statistics": dict,
            "ls": lambda limit=100, root=None: [],
            "check": lambda: {"problems": [], "loads": 0, "stores": 0},
            "flush": lambda root=None: {"dropped": 0},
        }
