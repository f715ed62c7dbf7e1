"""Real servers, shared between tests where their flags agree."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_server import Server, serve

Start = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory, run_dir_base: Path) -> Start:
    """Start a server of one's own: `with start_server("--tp", "2", model=...) as server`."""
    numbers = itertools.count()

    def start(
        *flags: str, model: str = "smollm2-135m", **environment: str
    ) -> contextlib.AbstractContextManager[Server]:
        run_dir, log_path = run_dir_base / f"server-{next(numbers)}", tmp_path_factory.mktemp("server") / "log"
        return serve(run_dir, log_path, model, *flags, **environment)

    return start


class SharedServers:
    """One server for all tests whose flags agree; tests keep out of each other's cache by `cache_salt`."""

    def __init__(self, start: Start, stack: contextlib.ExitStack) -> None:
        self._start = start
        self._stack = stack
        self._running: dict[tuple[str, ...], Server] = {}

    def __call__(self, *flags: str) -> Server:
        """The server of these flags, started when it is asked for first or has ended."""
        server = self._running.get(flags)
        if server is None or server.process.poll() is not None:
            server = self._running[flags] = self._stack.enter_context(self._start(*flags))
        return server


@pytest.fixture(scope="session")
def shared_server(start_server: Start) -> Iterator[SharedServers]:
    """`shared_server("--data_type", "float32")`; without flags the server as it is by default."""
    with contextlib.ExitStack() as stack:
        yield SharedServers(start_server, stack)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The packaged model's GGUF file."""
    from models.source import resolve_model

    return Path(resolve_model("smollm2-135m").path)
