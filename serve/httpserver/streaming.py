"""Responses that follow a generation: server-sent events, or one body at its end.

They speak ASGI themselves. Both watch the connection, so that a client that leaves stops the engine's work at once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.httpserver.answers import Answer, error_event
from serve.httpserver.errors import ApiError, ClientGoneError
from serve.httpserver.generation import Generation
from serve.httpserver.request_service import RequestService

# A stream's head waits for a first delta, so that a refusal can have its own status; at most so long.
FIRST_DELTA_WAIT_S = 10.0
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@contextlib.asynccontextmanager
async def watch_client(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_gone` when the client closes its connection within the block. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class GenerationResponse(Response):
    """Base: follows one generation to its end and closes it."""

    def __init__(self, service: RequestService, generation: Generation, answer: Answer) -> None:
        self.service = service
        self.generation = generation
        self.answer = answer
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watch_client(receive, self.generation.abort):
                await self.follow(scope, receive, send)
        except ClientGoneError:
            scope["varve.client_gone"] = True
        finally:
            self.service.close(self.generation)
            usage = self.generation.usage()
            scope["varve.usage"] = f"{usage.num_prompt}/{sum(usage.cached)}/{usage.num_completion}"

    async def follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        raise NotImplementedError


class EventStream(GenerationResponse):
    """Server-sent events; a failure before the first delta is an ordinary error, later it is an event."""

    async def follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.generation.wait_started(FIRST_DELTA_WAIT_S)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        send = scope["varve.send"]
        try:
            await self._send_deltas(send)
            last = self.answer.end(self.generation.usage())
        except ApiError as error:
            last = error_event(error.body())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_deltas(self, send: Send) -> None:
        generation, chunk = self.generation, self.answer.chunk
        while not generation.is_complete:
            deltas = await generation.next_deltas()
            body = chunk(deltas[0]) if len(deltas) == 1 else b"".join([chunk(delta) for delta in deltas])
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})


class WholeAnswer(GenerationResponse):
    """One JSON body when all sequences have ended."""

    async def follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = []
        try:
            while not self.generation.is_complete:
                deltas.extend(await self.generation.next_deltas())
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        body = self.answer.whole(deltas, len(self.generation.sequences), self.generation.usage())
        await Response(body, media_type="application/json")(scope, receive, send)
