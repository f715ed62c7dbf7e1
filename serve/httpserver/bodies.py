"""Request bodies: read within a limit, decoded strictly, validated into a model."""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from serve.httpserver.errors import ApiError, ClientGoneError, bad_request

MIN_BODY_LIMIT = 32 << 20
# The longest way to write one token: a few characters of text, each a six-byte escape.
BODY_BYTES_A_TOKEN = 64
# After a refusal the rest of a body is read and dropped, up to these, so that the client sees the answer.
MAX_LINGER_BYTES = 512 << 20
MAX_LINGER_S = 10.0
# For all of a body to come.
BODY_TIMEOUT_S = 120.0
# Longer bodies are decoded on a thread, so that streams go on meanwhile.
INLINE_BYTES = 256 << 10

Body = TypeVar("Body", bound=BaseModel)


def default_body_limit(max_total_tokens: int) -> int:
    """Bytes that a request for this context can reasonably have."""
    return max(MIN_BODY_LIMIT, BODY_BYTES_A_TOKEN * max_total_tokens)


class BodyTooLargeError(ApiError):
    """413. The rest of the body is still to come."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the request body is larger than {limit} bytes", code="request_too_large")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be too large, a 408, ClientGoneError."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLargeError(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise BodyTooLargeError(limit)
                parts.append(part)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        message = f"the request body did not come within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from error
    return b"".join(parts)


async def parse_body(request: Request, model: type[Body], limit: int) -> Body:
    """The body as a `model`. Raises ApiError: 408, 413, 415, or a 400 that names the field."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the body must be application/json", code="unsupported_media_type")
    body = await read_body(request, limit)
    if len(body) <= INLINE_BYTES:
        return validate(decode_json(body), model)
    return await asyncio.to_thread(lambda: validate(decode_json(body), model))


def decode_json(body: bytes) -> Any:
    """Strict JSON: valid UTF-8, no lone surrogates, no NaN or Infinity. Raises a 400."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except UnicodeError as error:
        raise bad_request("the body is not valid UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply", code="invalid_json") from error


def validate(data: Any, model: type[Body]) -> Body:
    """Plain data as a `model`. Raises a 400 that names the field."""
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    for name in data:
        if name not in model.model_fields:
            raise bad_request(f"unknown field {name[:100]!r}", name[:100], "unknown_parameter")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _named(error) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error


def _named(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return bad_request(f"{param}: {message}", param, code)


def _path(location: Iterable[int | str]) -> str:
    """`messages[0].role`; names of union members, which pydantic adds, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "list", "dict"):
            path += f".{part}" if path else part
    return path


class LingeringRefusal:
    """Middleware: after a 413 reads on for a while, because closing at once would make the client miss the answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = False

        async def send_first(message: Any) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 413:
                refused = True
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            if refused and message["type"] == "http.response.body":
                await send({**message, "more_body": True})
                await _drop_rest(receive)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receive, send_first)


async def _drop_rest(receive: Receive) -> None:
    size = 0
    try:
        async with asyncio.timeout(MAX_LINGER_S):
            while size < MAX_LINGER_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        pass
