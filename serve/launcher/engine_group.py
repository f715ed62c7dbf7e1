"""The engine group: router and workers. They start together, die together and are restarted under a new epoch."""

import logging
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from serve.errors import LaunchError
from serve.launcher.child_process import ChildProcess, ChildSpec, ChildStatus
from serve.launcher.children import Children
from serve.launcher.restart_policy import RestartPolicy

ENGINE_ROLES = ("router", "worker")

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """IDLE before the first start and after the last; REAPING: killed, not all reaped; WAITING: for the next start."""

    IDLE = "idle"
    STARTING = "starting"
    UP = "up"
    REAPING = "reaping"
    WAITING = "waiting"


MOVES = {
    EngineState.IDLE: {EngineState.STARTING},
    EngineState.STARTING: {EngineState.UP, EngineState.REAPING},
    EngineState.UP: {EngineState.REAPING},
    EngineState.REAPING: {EngineState.WAITING},
    EngineState.WAITING: {EngineState.STARTING},
}


class EngineListener(Protocol):
    """Who must hear of the group's ups and downs."""

    def engine_up(self, group: "EngineGroup") -> None:
        """All members are ready. May raise LaunchError when their answers make no engine."""

    def engine_down(self, group: "EngineGroup") -> None:
        """The last member of `group.epoch` has been reaped; `group.reason` says why."""


class EngineGroup:
    """State, epoch and members of the group. Times are of one monotonic clock, in seconds."""

    def __init__(
        self,
        children: Children,
        make_specs: Callable[[int, int], list[ChildSpec]],
        listener: EngineListener,
        start_timeout_s: float,
        policy: RestartPolicy,
    ) -> None:
        """make_specs: the members of (epoch, restarts)."""
        self.epoch = 0
        self.restarts = 0
        self.reason = ""
        self.state = EngineState.IDLE
        self.members: list[ChildProcess] = []
        self._children = children
        self._make_specs = make_specs
        self._listener = listener
        self._start_timeout_s = start_timeout_s
        self._policy = policy
        self._deadline = 0.0
        self._restart_at = 0.0
        self._up_at: float | None = None
        self._was_ever_up = False

    def _move(self, to: EngineState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"the engine group cannot go from {self.state.name} to {to.name}")
        self.state = to

    def start(self, now: float) -> None:
        """Spawn all members under the next epoch."""
        self._move(EngineState.STARTING)
        self.restarts += self.epoch > 0
        self.epoch += 1
        self._up_at = None
        self._deadline = now + self._start_timeout_s
        self.members = [self._children.spawn(spec) for spec in self._make_specs(self.epoch, self.restarts)]

    def on_ready(self, child: ChildProcess, now: float) -> None:
        """A member has finished starting."""
        if self.state is not EngineState.STARTING or child not in self.members:
            return
        if all(member.status is ChildStatus.READY for member in self.members):
            self._move(EngineState.UP)
            self._up_at = now
            try:
                self._listener.engine_up(self)
            except LaunchError as error:
                self.fail(str(error))
                return
            self._was_ever_up = True

    def fail(self, reason: str) -> None:
        """Kill all members. Raises LaunchError when the group has never been up: the user is still watching."""
        if self.state not in (EngineState.STARTING, EngineState.UP):
            return
        if not self._was_ever_up:
            raise LaunchError(reason)
        logger.error("the engine of epoch %d is down: %s", self.epoch, reason)
        self.reason = reason
        self._move(EngineState.REAPING)
        for member in self.members:
            member.kill()

    def on_end(self, child: ChildProcess, now: float) -> None:
        """A member has been reaped. Raises LaunchError when the group dies again and again."""
        if child not in self.members:
            return
        self.fail(child.describe_end())
        self.members.remove(child)
        if not self.members:
            self._move(EngineState.WAITING)
            self._listener.engine_down(self)
            self._schedule(now)

    def _schedule(self, now: float) -> None:
        delay = self._policy.delay_after(self._up_at, now)
        if delay is None:
            raise LaunchError(f"the engine keeps failing, giving up: {self.reason}")
        self._restart_at = now + delay
        logger.info("the engine starts again in %.1f s", delay)

    def tick(self, now: float) -> None:
        """Do what is due: a restart, or the end of a start that takes too long."""
        if self.state is EngineState.WAITING and now >= self._restart_at:
            self.start(now)
        elif self.state is EngineState.STARTING and now >= self._deadline:
            self.fail(describe_late(self.members, self._start_timeout_s))


def describe_late(children: list[ChildProcess], timeout_s: float) -> str:
    """One line: who was not ready in time, and what it did last."""
    late = [child for child in children if child.status is not ChildStatus.READY]
    parts = []
    for child in late:
        at = child.progress
        parts.append(f"{child.name} ({at.phase} {at.done}/{at.total})" if at else child.name)
    return f"not ready within {timeout_s:g} s: {', '.join(parts)}"
