"""A fake OpenAI-compatible server: a thread that answers with given bytes after given delays."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

Script = list[tuple[float, bytes]]
Respond = Callable[[str, dict[str, Any]], Script]


def head(status: str = "200 OK", extra: str = "Transfer-Encoding: chunked\r\n") -> bytes:
    """A response head."""
    return f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\n{extra}\r\n".encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> bytes:
    """One server-sent event as a chunk."""
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def plain(status: str, body: bytes) -> Script:
    """A response with a length."""
    return [(0.0, head(status, f"Content-Length: {len(body)}\r\n") + body)]


def stream(num_tokens: int, first: float, gap: float, usage: dict[str, Any] | None, word: str = " w") -> Script:
    """A completion of `num_tokens` events: the first after `first` seconds, then one every `gap`."""
    script: Script = [(0.0, head())]
    for i in range(num_tokens):
        reason = "length" if i == num_tokens - 1 else None
        delay = first if i == 0 else gap
        script.append((delay, event(choices=[{"index": 0, "text": word, "finish_reason": reason}])))
    tail = event(choices=[], usage=usage) if usage is not None else b""
    script.append((0.0, tail + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"))
    return script


class FakeServer:
    """Serves `respond(path, body)` on `base_url`; `requests` keeps the bodies that came. A context manager."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.base_url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            text = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(text)
            length = next((int(x.split(":")[1]) for x in text.lower().split("\r\n") if "content-length" in x), 0)
            raw = await reader.readexactly(length)
            body = json.loads(raw) if raw else {}
            path = text.split()[1]
            if raw:
                self.requests.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            for delay, data in self._respond(path, body):
                if delay:
                    await asyncio.sleep(delay)
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.in_flight -= 1
            writer.close()
