"""The control plane: RPyC over Unix sockets in the run directory, pickle off, only exposed methods.

Calls run on the thread that owns the state: a server thread queues them, the owner runs them with `run_pending`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class ControlServer:
    """Serves `handlers` (name -> function of keyword arguments giving plain data: numbers, strings, lists, dicts)."""

    def __init__(self, run_dir: Path, name: str, handlers: dict[str, Callable[..., Any]]) -> None:
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable when calls are pending."""
        raise NotImplementedError

    def run_pending(self) -> None:
        """Run queued calls on the calling thread; an exception goes back to its caller."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ControlClient:
    """Calls another process's ControlServer. Each call has a deadline and gives plain data."""

    def __init__(self, run_dir: Path, name: str, timeout_s: float = 5.0) -> None:
        raise NotImplementedError

    def call(self, method: str, **arguments: Any) -> Any:
        """Raises ControlError with one line when the peer is away, late, or raised."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
