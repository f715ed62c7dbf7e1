"""A child that is restarted alone: an HTTP process or the cache manager."""

import logging
from collections.abc import Callable

from serve.errors import LaunchError
from serve.launcher.child_process import ChildProcess, ChildSpec, ChildStatus
from serve.launcher.children import Children
from serve.launcher.engine_group import describe_late
from serve.launcher.restart_policy import RestartPolicy

logger = logging.getLogger(__name__)


class Service:
    """One role and index over all its lives. Times are of one monotonic clock, in seconds."""

    def __init__(
        self,
        children: Children,
        make_spec: Callable[[int], ChildSpec],
        start_timeout_s: float,
        policy: RestartPolicy,
    ) -> None:
        """make_spec: for the number of earlier lives."""
        self.child: ChildProcess | None = None
        self.restarts = 0
        self._children = children
        self._make_spec = make_spec
        self._start_timeout_s = start_timeout_s
        self._policy = policy
        self._deadline = 0.0
        self._restart_at = 0.0
        self._was_ever_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether it has a living child that has finished starting."""
        return self.child is not None and self.child.status is ChildStatus.READY

    def start(self, now: float) -> None:
        """Spawn it."""
        self._deadline = now + self._start_timeout_s
        self.child = self._children.spawn(self._make_spec(self.restarts))

    def on_ready(self) -> None:
        """Its child has finished starting."""
        self._was_ever_ready = True

    def on_end(self, child: ChildProcess, now: float) -> None:
        """Its child has been reaped. Raises LaunchError at the first start, and when it dies again and again."""
        reason = child.describe_end()
        self.child = None
        if not self._was_ever_ready:
            raise LaunchError(reason)
        delay = self._policy.delay_after(child.ready_at, now)
        if delay is None:
            raise LaunchError(f"{child.name} keeps failing, giving up: {reason}")
        logger.error("%s; it starts again in %.1f s", reason, delay)
        self.restarts += 1
        self._restart_at = now + delay

    def tick(self, now: float) -> None:
        """Do what is due: a restart, or the end of a start that takes too long."""
        if self.child is None:
            if now >= self._restart_at:
                self.start(now)
        elif self.child.status is ChildStatus.STARTING and now >= self._deadline:
            late = describe_late([self.child], self._start_timeout_s)
            if not self._was_ever_ready:
                raise LaunchError(late)
            self.child.failure = late
            self.child.kill()
