"""Bodies are read within limits and decoded strictly; each refusal says what is wrong."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from serve.httpserver import bodies
from serve.httpserver.bodies import LingeringRefusal, decode_json, default_body_limit, parse_body, read_body, validate
from serve.httpserver.errors import ApiError, ClientGoneError


class Inner(BaseModel):
    model_config = ConfigDict(strict=True)

    x: int


class Body(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    items: list[Inner] = []


def request(parts: list[bytes], ends: bool = True, **headers: str) -> Request:
    """A request whose body comes in parts; without an end it never does."""
    last = {"type": "http.disconnect"} if not ends else None
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends and messages:
        messages[-1]["more_body"] = False
    queue = [*messages, *([last] if last else [])]

    async def receive() -> dict[str, Any]:
        if not queue:
            await asyncio.sleep(60)
        return queue.pop(0)

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": named}, receive)


def refusal(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None, str | None]:
    found = error.value.body()["error"]
    return error.value.status, found["param"], found["code"]


def test_a_body_in_parts_is_read_whole():
    assert asyncio.run(read_body(request([b"ab", b"", b"c"]), 3)) == b"abc"


@pytest.mark.parametrize(
    "asked",
    [request([b"abcd"]), request([b"ab", b"cd"]), request([b""], content_length="4")],
    ids=["part", "sum", "announced"],
)
def test_a_body_beyond_the_limit_is_a_413(asked: Request):
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(asked, 3))
    assert refusal(caught) == (413, None, "request_too_large")


def test_a_client_that_leaves_or_dawdles_ends_the_reading(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ClientGoneError):
        asyncio.run(read_body(request([b"a"], ends=False), 9))
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.01)
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(request([]), 9))
    assert refusal(caught) == (408, None, "request_timeout")


def test_only_json_is_taken():
    assert asyncio.run(parse_body(request([b'{"name": "x"}']), Body, 99)).name == "x"
    kind = {"content_type": "application/vnd.api+json; charset=utf-8"}
    assert asyncio.run(parse_body(request([b'{"name": "x"}'], **kind), Body, 99)).name == "x"
    with pytest.raises(ApiError) as caught:
        asyncio.run(parse_body(request([b"{}"], content_type="text/plain"), Body, 99))
    assert caught.value.status == 415


def test_long_bodies_are_decoded_as_well_as_short_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "INLINE_BYTES", 4)
    assert asyncio.run(parse_body(request([b'{"name": "long"}']), Body, 99)).name == "long"
    with pytest.raises(ApiError) as caught:
        asyncio.run(parse_body(request([b'{"name": 5}']), Body, 99))
    assert refusal(caught)[:2] == (400, "name")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'a': 1}", b'{"a": NaN}', b"\xff", b'{"a": "\xc3"}', b'{"a": "\\ud800"}', b"[" * 5000, b"1 2"],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_not_strict_json_is_a_400(body: bytes):
    with pytest.raises(ApiError) as caught:
        decode_json(body)
    assert refusal(caught) == (400, None, "invalid_json")


@pytest.mark.parametrize(
    ("data", "param", "code"),
    [
        ([], None, "invalid_json"),
        ({}, "name", "missing_required_parameter"),
        ({"name": 5}, "name", "invalid_value"),
        ({"name": "x", "items": [{"x": 1}, {"x": "y"}]}, "items[1].x", "invalid_value"),
        ({"name": "x", "other": 1}, "other", "unknown_parameter"),
        ({"name": "x", "y" * 500: 1}, "y" * 100, "unknown_parameter"),
    ],
)
def test_a_wrong_field_is_named(data: Any, param: str | None, code: str):
    with pytest.raises(ApiError) as caught:
        validate(data, Body)
    assert refusal(caught) == (400, param, code)


def test_the_limit_follows_the_context():
    assert default_body_limit(10) == bodies.MIN_BODY_LIMIT
    assert default_body_limit(10**7) == 64 * 10**7


def test_after_a_413_the_rest_is_read_before_the_answer_ends():
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": scope["status"], "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def talk(status: int) -> list[Any]:
        rest = [{"type": "http.request", "body": b"x" * 10, "more_body": more} for more in (True, False)]
        sent = []

        async def receive() -> Any:
            events.append("read")
            return rest.pop(0)

        async def send(message: Any) -> None:
            events.append(message["type"].rpartition(".")[2])
            sent.append(message)

        await LingeringRefusal(app)({"type": "http", "status": status}, receive, send)
        return sent

    sent = asyncio.run(talk(413))
    assert events == ["start", "body", "read", "read", "body"]
    assert (b"connection", b"close") in sent[0]["headers"]
    events.clear()
    assert asyncio.run(talk(200))[0]["headers"] == []
    assert events == ["start", "body"]
