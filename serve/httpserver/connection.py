"""The HTTP/1.1 protocol of one connection: uvicorn's, with bounds on a request's head and errors of OpenAI's shape."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.httpserver.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
# From a connection, or the first byte of a later request, to the end of the request's head.
HEAD_TIMEOUT_S = 30.0

# Anybody can send nonsense; a line for each piece of it would let them fill the disk.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class HeadTooLargeError(Exception):
    """Raised within the parser, which turns it into an error of its own."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses heads that are too large, come too slowly, or are not HTTP, and closes the connection."""

    _is_in_head = True
    _head_bytes = 0  # roughly: what came in the same piece as the end of the request before is not counted
    _was_completed = False
    _is_too_large = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head and self._head_timer is None:
            self._await_head()
        self._was_completed = False
        super().data_received(data)
        if self._is_in_head and not self._was_completed and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._is_too_large = True
                self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._is_too_large = True
            raise HeadTooLargeError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = self._was_completed = True
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that no handler sees, and close."""
        self._stop_timer()
        if self._is_too_large:
            self._refuse(431, f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(400, "the request is not valid HTTP/1.1")

    def _await_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self._is_answering:
            self._await_head()  # a client may send ahead, even a stray line end after a body
        elif self._head_bytes:
            self._refuse(408, f"the request's headers did not come within {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Nothing but the end of the connection while an earlier request is being answered on it."""
        if not self._is_answering:
            self.transport.write(plain_response(ApiError(status, message)))
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def plain_response(error: ApiError) -> bytes:
    """A whole response, for connections that have no request."""
    body = msgspec.json.encode(error.body())
    status = HTTPStatus(error.status)
    head = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in head.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def server_options() -> dict[str, Any]:
    """Of uvicorn's configuration: what every server of ours has, the tests' too."""
    return {
        "loop": "none",
        "http": BoundedHttpProtocol,
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "log_config": None,
        "server_header": False,
    }
