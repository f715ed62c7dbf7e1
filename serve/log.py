"""Log lines: time, level, process, request, text. They go to stdout; stderr is for the one line that ends a start."""

import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


@contextlib.contextmanager
def request_id(identifier: str) -> Iterator[None]:
    """Log lines of this context (thread or asyncio task) name the request."""
    token = _request_id.set(identifier)
    try:
        yield
    finally:
        _request_id.reset(token)


class LineFormatter(logging.Formatter):
    """`14:02:11.350 INFO     router-0 [req-1] text`, with the request where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        identifier = _request_id.get()
        request = f" [{identifier}]" if identifier else ""
        line = f"{clock} {record.levelname:<8} {self._process}{request} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(process: str, level: str) -> None:
    """Send all logging of this process to stdout, and log uncaught exceptions of any thread once."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("serve", "models", "kernels"):
        logging.getLogger(package).setLevel(_LEVELS[level])
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("serve").critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit or arguments.exc_value is None:
        return
    name = arguments.thread.name if arguments.thread else "?"
    trace = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    logging.getLogger("serve").critical("uncaught exception in thread %s", name, exc_info=trace)
