"""`varve serve`: settle everything that can be settled without a process, then run the launcher."""

import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from serve import log
from serve.config import ServeConfig
from serve.config_resolve import MachineShape, resolve
from serve.errors import UserError
from serve.ipc.child import ROLE_MODULES
from serve.launcher.events import EventLoop, StopRequestedError, raise_stop, stop_signals
from serve.launcher.http_socket import bind_http_socket
from serve.launcher.launcher import Launch, Launcher
from serve.launcher.model_facts import LoadedModel, ModelFacts, Progress
from serve.launcher.progress import ProgressReporter
from serve.launcher.run_directory import RunDirectory
from serve.machine import detect_device, usable_cores

logger = logging.getLogger(__name__)
MAX_OPEN_FILES = 65536


@dataclass(frozen=True)
class Parts:
    """What tests replace: the model, and the module of each role."""

    load_model: Callable[[ServeConfig, Progress], ModelFacts] = LoadedModel.load
    roles: Mapping[str, str] = field(default_factory=lambda: dict(ROLE_MODULES))


def launch(serve: ServeConfig, parts: Parts | None = None) -> int:
    """Serve until stopped; gives the exit code. What the user can put right is one line on stderr."""
    log.set_up("launcher", serve.log_level)
    try:
        with stop_signals_raise():
            _run(serve, parts or Parts())
    except StopRequestedError:
        return 0
    except UserError as error:
        print(f"varve: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(serve: ServeConfig, parts: Parts) -> None:
    raise_file_limit()
    with ExitStack() as stack:
        # First of all, so that a port in use is told before a model is fetched.
        listener = stack.enter_context(bind_http_socket(serve.host, serve.port))
        started = time.monotonic()
        model = _load(serve, parts)
        phases = {"resolve model": time.monotonic() - started}
        machine = MachineShape(detect_device(os.environ), usable_cores())
        # Before the directory is made, and so left after it is removed: no signal comes between.
        events = stack.enter_context(EventLoop())
        run_directory = stack.enter_context(RunDirectory.create(serve.run_dir, os.environ))
        config = resolve(serve, model.shape, machine, run_directory.path)
        logger.info("run directory %s", run_directory.path)
        Launcher(Launch(config, model, parts.roles, listener, phases), events).run()


def _load(serve: ServeConfig, parts: Parts) -> ModelFacts:
    progress = ProgressReporter()
    try:
        return parts.load_model(serve, lambda phase, done, total: progress.update("launcher", phase, done, total))
    finally:
        progress.close()


def raise_file_limit() -> None:
    """Let HTTP processes, which inherit the limit, hold as many connections as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Inside, signals to stop raise StopRequestedError; what is set up is then taken down on the way out."""
    previous = {number: signal.signal(number, raise_stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
