"""The control plane: RPyC over Unix sockets in the run directory, pickle off, only exposed methods.

Calls run on the thread that owns the state: a server thread queues them, the owner runs them with `run_pending`. One
method is exposed, and only bytes cross the wire (msgpack of plain data), so no reference to an object ever does.
"""

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import rpyc
from rpyc.core.async_ import AsyncResultTimeout
from rpyc.utils.server import ThreadedServer

from serve.ipc.run_paths import socket_path
from serve.ipc.wakeup import Wakeup

PROTOCOL = {
    "allow_pickle": False,
    "allow_exposed_attrs": True,
    "allow_safe_attrs": False,
    "allow_public_attrs": False,
    "allow_all_attrs": False,
    "allow_setattr": False,
    "allow_delattr": False,
    "import_custom_exceptions": False,
    "instantiate_custom_exceptions": False,
    "include_local_traceback": False,
    "log_exceptions": False,
}
# How much longer a client waits than it lets the server wait, so that the server's own answer wins.
_GRACE_S = 0.5

logger = logging.getLogger(__name__)
_wire_logger = logging.getLogger(f"{__name__}.wire")


class ControlError(Exception):
    """A control call failed; one line says why."""


class _Reply(msgspec.Struct):
    """value: what the handler gave; error: one line, when it failed."""

    value: Any = None
    error: str | None = None


@dataclass
class _Call:
    method: str
    arguments: dict[str, Any]
    reply: Future[bytes]


def _process_facts() -> dict[str, Any]:
    """Of the serving process: its pid, and whether torch was ever imported there."""
    return {"pid": os.getpid(), "has_torch": "torch" in sys.modules}


class _Service(rpyc.Service):  # type: ignore[misc]
    """The one object that clients reach."""

    def __init__(self, submit: Callable[[bytes, bytes, float], bytes]) -> None:
        self._submit = submit

    def exposed_call(self, method: bytes, arguments: bytes, timeout_s: float) -> bytes:
        return self._submit(method, arguments, timeout_s)


class _Server(ThreadedServer):  # type: ignore[misc]
    """A client that goes, or a server that closes, in the middle of a call is no news; RPyC logs a trace for it."""

    def _authenticate_and_serve_client(self, sock: socket.socket) -> None:
        try:
            super()._authenticate_and_serve_client(sock)
        except (EOFError, OSError, ValueError) as error:
            logger.debug("a control connection ended: %s", error)


class ControlServer:
    """Serves `handlers` (name -> function of keyword arguments giving plain data: numbers, strings, lists, dicts).

    Every server also answers `process`: facts about the process that it runs in.
    """

    def __init__(self, run_dir: Path, name: str, handlers: dict[str, Callable[..., Any]]) -> None:
        """name: of the socket, `control-ROLE-INDEX`. Raises SocketPathError, or OSError when the directory is gone."""
        self.name = name
        self._handlers = {"process": _process_facts, **handlers}
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._path = socket_path(run_dir, name)
        self._path.unlink(missing_ok=True)
        _wire_logger.setLevel(logging.CRITICAL)
        self._server = _Server(
            _Service(self._submit), socket_path=str(self._path), protocol_config=dict(PROTOCOL), logger=_wire_logger
        )
        self._server._listen()  # here, so that clients can connect as soon as the constructor has returned
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while self._server.active:
                self._server.accept()
        except EOFError:
            pass  # closed

    def _submit(self, method: bytes, arguments: bytes, timeout_s: float) -> bytes:
        """On a server thread: queue the call for the owner and wait for its reply."""
        name = method.decode()
        if name not in self._handlers:
            return _failure(f"{self.name} has no method {name!r}, it has: {', '.join(sorted(self._handlers))}")
        call = _Call(name, msgspec.msgpack.decode(arguments), Future())
        self._calls.put(call)
        self._wakeup.set()
        try:
            return call.reply.result(timeout_s)
        except TimeoutError:
            if call.reply.cancel():
                return _failure(f"{self.name} was too busy to run {name!r} within {timeout_s:g} s")
            return _failure(f"{self.name} runs {name!r} for more than {timeout_s:g} s, and goes on with it")
        except CancelledError:
            return _failure(f"{self.name} is closing")

    def fileno(self) -> int:
        """Readable when calls are pending."""
        return self._wakeup.fileno()

    def run_pending(self) -> None:
        """Run queued calls on the calling thread; an exception goes back to its caller."""
        self._wakeup.clear()
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call.reply.set_running_or_notify_cancel():  # not, when its caller has stopped waiting
                call.reply.set_result(self._run(call))

    def _run(self, call: _Call) -> bytes:
        try:
            return msgspec.msgpack.encode(_Reply(value=self._handlers[call.method](**call.arguments)))
        except Exception as error:  # whatever it is, it belongs to the caller and not to the owner's loop
            logger.warning("control call %s failed", call.method, exc_info=True)
            return _failure(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop serving; calls that wait get an error."""
        self._server.close()
        self._thread.join(timeout=1)
        while not self._calls.empty():
            self._calls.get_nowait().reply.cancel()
        self._path.unlink(missing_ok=True)
        self._wakeup.close()


def _failure(text: str) -> bytes:
    return msgspec.msgpack.encode(_Reply(error=" ".join(text.split())))


class ControlClient:
    """Calls another process's ControlServer. Each call has a deadline and gives plain data. For one thread."""

    def __init__(self, run_dir: Path, name: str, timeout_s: float = 5.0) -> None:
        """Connects at the first call, and again when the peer was restarted."""
        self._path = socket_path(run_dir, name)
        self._name = name
        self._timeout_s = timeout_s
        self._connection: Any = None

    def call(self, method: str, **arguments: Any) -> Any:
        """Raises ControlError with one line when the peer is away, late, or raised."""
        packed = msgspec.msgpack.encode(arguments)
        try:
            answer = self._connect().root.call(method.encode(), packed, self._timeout_s)
        except (AsyncResultTimeout, TimeoutError) as error:
            self.close()
            raise ControlError(f"{self._name} did not answer {method!r} within {self._timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            self.close()
            raise ControlError(f"{self._name} does not answer: {error}") from error
        reply = msgspec.msgpack.decode(answer, type=_Reply)
        if reply.error is not None:
            raise ControlError(reply.error)
        return reply.value

    def _connect(self) -> Any:
        if self._connection is None or self._connection.closed:
            config = {**PROTOCOL, "sync_request_timeout": self._timeout_s + _GRACE_S}
            self._connection = rpyc.utils.factory.unix_connect(str(self._path), config=config)
        return self._connection

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
