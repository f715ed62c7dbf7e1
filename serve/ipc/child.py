"""Entry of every child process, and its line to the launcher.

`python -m serve.ipc.child ROLE INDEX FD` receives ChildStart over FD and calls `main(context)` of the role's module
(`ROLE_MODULES`). An exception that `main` raises as `StartError` becomes ChildFailed; any other one is logged with its trace.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.config import ResolvedConfig
from serve.ipc.messages import Message

ROLE_MODULES = {
    "httpserver": "serve.httpserver.process",
    "router": "serve.router.process",
    "cache": "serve.multi_level_cache.process",
    "worker": "serve.model_infer.process",
}


class StartError(Exception):
    """Start-up failed for a reason that one line explains to the user."""


@dataclass(frozen=True)
class ChildContext:
    """What a child knows from the launcher. fds: 'table' (RequestTable), 'listen' (HTTP socket), as available."""

    role: str
    index: int
    epoch: int
    config: ResolvedConfig
    model: dict[str, Any]
    run_dir: Path
    fds: dict[str, int]
    parent: "ParentPipe"


class ParentPipe:
    """A child's line to the launcher. A thread ends the process when the launcher's end closes."""

    def send(self, message: Message) -> None:
        raise NotImplementedError

    def receive(self) -> list[Message]:
        """Messages that have come (EngineUp, EngineDown, ServerDown, StopChild); never blocks."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable when `receive` has something; for pollers and event loops."""
        raise NotImplementedError
