"""A minimal HTTP/1.1 client: one request a connection, every piece of the body stamped with the time it came.

The load generator shares its cores with the server it measures, so that nothing is decoded while a response streams:
the C parser of httptools strips the framing, and pieces are kept as they are.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

import httptools

from serve.bench.flags import BenchError


class FailureKind(Enum):
    """Why a request failed. HTTP_STATUS comes with the status code, in `detail`."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    DISCONNECTED = "disconnected"
    HTTP_STATUS = "http_status"
    PROTOCOL = "protocol"
    STREAM_ERROR = "stream_error"
    NO_OUTPUT = "no_output"


@dataclass(frozen=True)
class Failure:
    """What went wrong, with one line of what the server or the system said."""

    kind: FailureKind
    detail: str


@dataclass(frozen=True)
class Target:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> "Target":
        """Of `http(s)://host[:port][/prefix]`; a trailing /v1 is dropped, for routes bring it."""
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError as error:
            raise BenchError(f"--base_url {base_url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"--base_url {base_url}: should be http://HOST:PORT")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    def encode(self, method: str, path: str, body: bytes, api_key: str | None) -> bytes:
        """A whole request, ready to be sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Response:
    """What came back. Times are of `time.perf_counter`; reads are (time, piece of the body)."""

    start: float
    end: float = 0.0
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.reads)


class _StreamProtocol(asyncio.Protocol):
    """Fills a `Response`; `done` is set once, at the end of the message or of the connection."""

    def __init__(self, response: Response) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._response = response
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._framed = False

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(Failure(FailureKind.PROTOCOL, str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = time.perf_counter()
        complete = exc is None and self._response.status != 0 and not self._framed
        self._finish(None if complete else Failure(FailureKind.DISCONNECTED, str(exc or "closed before the end")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._response.reads.append((self._now, body))

    def on_message_complete(self) -> None:
        self._finish(None)

    def _finish(self, failure: Failure | None) -> None:
        if not self.done.done():
            self._response.end = self._now
            self._response.failure = failure
            self.done.set_result(None)


async def exchange(target: Target, request: bytes, timeout: float) -> Response:
    """Send one encoded request and take its whole response; failures are in the response, nothing is raised.

    The clock starts before the connection is made: what a full accept queue costs is the user's time too.
    """
    response = Response(start=time.perf_counter())
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout):
            context = ssl.create_default_context() if target.tls else None
            transport, protocol = await asyncio.get_running_loop().create_connection(
                lambda: _StreamProtocol(response), target.host, target.port, ssl=context
            )
            transport.write(request)
            await protocol.done
    except TimeoutError:
        response.failure = Failure(FailureKind.TIMEOUT, f"no end after {timeout:g} s")
    except OSError as error:
        response.failure = Failure(FailureKind.CONNECT, " ".join(str(error).split()))
    finally:
        if transport is not None:
            transport.abort()
        response.end = response.end or time.perf_counter()
    return response
