"""Entry of every child process, and its line to the launcher.

`python -m serve.ipc.child ROLE INDEX FD` receives ChildStart over FD and calls `main(context)` of the role's module
(`ROLE_MODULES`). An exception that `main` raises as `StartError` becomes ChildFailed; any other one is logged with its
trace.
"""

import importlib
import logging
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve import log
from serve.config import ResolvedConfig
from serve.ipc.messages import ChildFailed, ChildStart, Message
from serve.ipc.pipe import MessagePipe, PipeClosedError
from serve.ipc.process_control import become_child
from serve.ipc.wakeup import Wakeup
from serve.ipc.wire import MalformedFrameError

ROLE_MODULES = {
    "httpserver": "serve.httpserver.process",
    "router": "serve.router.process",
    "cache": "serve.multi_level_cache.process",
    "worker": "serve.model_infer.process",
}

# The launcher sends ChildStart with the spawn; who waits longer has none.
START_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class StartError(Exception):
    """Start-up failed for a reason that one line explains to the user."""


@dataclass(frozen=True)
class ChildContext:
    """What a child knows from the launcher.

    model: `config` (ModelConfig.to_dict), `layout` (page size, groups) and `source` (kind, path, files) as plain data.
    fds: 'table' (RequestTable), 'listen' (HTTP socket), 'arena' and 'arena_header' (HostArena), as available.
    restarts: earlier lives of this child.
    """

    role: str
    index: int
    epoch: int
    config: ResolvedConfig
    model: dict[str, Any]
    run_dir: Path
    fds: dict[str, int]
    parent: "ParentPipe"
    restarts: int = 0


def end_now() -> None:
    """End this process at once, whatever its other threads do."""
    os._exit(1)


class ParentPipe:
    """A child's line to the launcher. A thread ends the process when the launcher's end closes."""

    def __init__(self, fd: int, on_parent_gone: Callable[[], None] = end_now) -> None:
        """fd: this end of the socket pair. on_parent_gone: called by the reading thread when the line breaks."""
        os.set_inheritable(fd, False)
        self._pipe = MessagePipe(socket.socket(fileno=fd))
        self._messages: deque[Message] = deque()
        self._wakeup = Wakeup()
        self._on_parent_gone = on_parent_gone
        threading.Thread(target=self._read, name="parent-pipe", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                messages = self._pipe.receive()
            except (PipeClosedError, MalformedFrameError):
                self._on_parent_gone()
                return
            self._messages.extend(messages)
            if messages:
                self._wakeup.set()

    def send(self, message: Message) -> None:
        """Any thread may call. A line that is broken ends the process anyhow, so that is no error here."""
        try:
            self._pipe.send(message)
        except PipeClosedError:
            logger.debug("the launcher is gone")

    def receive(self) -> list[Message]:
        """Messages that have come since the last call, ChildStart apart; never blocks."""
        self._wakeup.clear()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def receive_start(self, timeout_s: float) -> ChildStart:
        """Wait for the first message; later ones stay for `receive`. Raises StartError."""
        if not select.select([self], [], [], timeout_s)[0]:
            raise StartError(f"no start message within {timeout_s:g} s")
        first = self._messages.popleft()
        if not isinstance(first, ChildStart):
            raise StartError(f"expected ChildStart, got {type(first).__name__}")
        if not self._messages:
            self._wakeup.clear()
            if self._messages:  # one came between the two lines above
                self._wakeup.set()
        return first

    def fileno(self) -> int:
        """Readable when `receive` has something; for pollers and event loops."""
        return self._wakeup.fileno()


def make_context(role: str, index: int, start: ChildStart, parent: ParentPipe) -> ChildContext:
    """The context that a ChildStart describes."""
    config = ResolvedConfig.model_validate_json(start.config_json)
    return ChildContext(
        role=role,
        index=index,
        epoch=start.epoch,
        config=config,
        model=start.model,
        run_dir=config.run_dir,
        fds=start.fds,
        parent=parent,
        restarts=start.restarts,
    )


def run_child(role: str, index: int, fd: int) -> int:
    """Run one child to its end; gives the exit code."""
    become_child(f"varve-{role}-{index}")
    parent = ParentPipe(fd)
    log.set_up(f"{role}-{index}", "info")  # until the config tells
    try:
        start = parent.receive_start(START_TIMEOUT_S)
        context = make_context(role, index, start, parent)
        log.set_up(f"{role}-{index}", context.config.serve.log_level)
        module = importlib.import_module(start.module or ROLE_MODULES[role])
        module.main(context)
    except StartError as error:
        parent.send(ChildFailed(role=role, index=index, reason=str(error)))
        return 1
    except Exception:  # the last frame of the process: nobody above could log it
        logger.critical("ends on an unexpected error", exc_info=True)
        return 1
    return 0


def _main() -> None:
    role, index, fd = sys.argv[1:4]
    code = run_child(role, int(index), int(fd))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a library's thread or exit handler must not keep a finished child alive.
    os._exit(code)


if __name__ == "__main__":
    # Under `-m` this file is `__main__`; role modules import `serve.ipc.child`. Both must mean the same StartError.
    from serve.ipc.child import _main as main_of_module

    main_of_module()
