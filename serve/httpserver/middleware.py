"""Around every request: its id, its log line, its count."""

import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import log
from serve.httpserver.errors import CLIENT_CLOSED_REQUEST, ApiError
from serve.httpserver.metrics import HttpMetrics

logger = logging.getLogger(__name__)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}\Z")
_METHODS = frozenset(("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"))


def request_id_of(scope: Scope) -> str:
    """The id that the client gave in X-Request-Id if it is short and plain, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex


class RequestContext:
    """Sets `scope["varve.request_id"]`, returns it as X-Request-Id, logs one line and counts the request.

    An error that no handler knows is logged with its trace and answered with a 500, or cuts an answer that has begun.
    `scope["varve.send"]` is the way past the middleware, for the many body messages of a stream;
    `scope["varve.began"]` is when the request's head was there (`time.monotonic`).
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # the answer to GET, of which uvicorn sends the head only
            scope = {**scope, "method": "GET"}
        request_id = scope["varve.request_id"] = request_id_of(scope)
        scope["varve.send"] = send
        began, status = time.monotonic(), 0
        scope["varve.began"] = began

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        with log.request_id(request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:  # nobody above knows the request's id
                logger.exception("the request failed on an unexpected error")
                if not status:
                    error = ApiError(500, "the server had an error while processing the request")
                    await error.response()(scope, receive, send_with_id)
            finally:
                code = CLIENT_CLOSED_REQUEST if scope.get("varve.client_gone") else status
                self._finish(scope, method, code, time.monotonic() - began)

    def _finish(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route: Any = scope.get("route")
        path = getattr(route, "path", "unmatched")
        method = method if method in _METHODS else "OTHER"
        self._metrics.requests.inc(1, method, path, str(status))
        if path in ("/health", "/readiness", "/metrics"):
            return
        if "varve.usage" in scope:
            self._metrics.request.observe(seconds)
        tokens = scope.get("varve.usage", "-")  # prompt/cached/generated
        logger.info("%s %s %d %.3fs %s", method, path, status, seconds, tokens)
