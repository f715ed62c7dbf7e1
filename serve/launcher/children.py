"""All living children of the launcher: spawned, listened to, signalled and reaped in one place."""

import logging
from collections.abc import Callable

from serve.ipc.messages import Message
from serve.launcher.child_process import ChildProcess, ChildSpec, ChildStatus
from serve.launcher.events import EventLoop

logger = logging.getLogger(__name__)


class Children:
    """The only place that reaps. on_message and on_end are called from `read` and `reap`, on the launcher's thread."""

    def __init__(
        self,
        events: EventLoop,
        config_json: bytes,
        model: dict[str, object],
        on_message: Callable[[ChildProcess, Message], None],
        on_end: Callable[[ChildProcess], None],
    ) -> None:
        self._events = events
        self._config_json = config_json
        self._model = model
        self._on_message = on_message
        self._on_end = on_end
        self._living: list[ChildProcess] = []
        self._listening: set[ChildProcess] = set()

    def spawn(self, spec: ChildSpec) -> ChildProcess:
        """Start a child and listen to it."""
        child = ChildProcess.spawn(spec, self._config_json, self._model)
        self._living.append(child)
        self._listening.add(child)
        self._events.watch(child.pipe, lambda: self._read(child))
        logger.debug("started %s as process %d, epoch %d", child.name, child.pid, spec.epoch)
        return child

    def living(self, *roles: str) -> list[ChildProcess]:
        """Children not yet reaped, of these roles, or all."""
        return [child for child in self._living if not roles or child.spec.role in roles]

    def send(self, message: Message, *roles: str) -> None:
        """To every ready child of these roles."""
        for child in self.living(*roles):
            if child.status is ChildStatus.READY:
                child.send(message)

    def kill(self, *roles: str) -> None:
        """SIGKILL to all living children of these roles, or to all; they are reaped later."""
        for child in self.living(*roles):
            child.kill()

    def reap(self) -> None:
        """Notice children that have ended: first what they still said, then their end."""
        for child in list(self._living):
            if not child.has_ended():
                continue
            while child in self._listening:
                self._read(child)
            child.pipe.close()
            child.status = ChildStatus.ENDED
            self._living.remove(child)
            self._on_end(child)

    def _read(self, child: ChildProcess) -> None:
        messages = child.receive()
        if messages is None:
            self._events.unwatch(child.pipe)
            self._listening.discard(child)
            child.kill()  # without its line it cannot be told anything, and would end by itself anyhow
            return
        for message in messages:
            self._on_message(child, message)
