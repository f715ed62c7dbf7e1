import asyncio
import json
from urllib.parse import urlsplit

import pytest

from serve.httpserver import bodies, connection

BODY = json.dumps({"model": "smol", "prompt": "Hi", "max_tokens": 2}).encode()


async def exchange(url: str, *pieces: bytes) -> bytes:
    """What a server says to these pieces until it closes; the client closes only then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


def ask(bench, run, serve_app, *pieces: bytes) -> tuple[int, str, bytes]:
    """Status, head and body of the answer."""

    async def scenario() -> bytes:
        async with serve_app(bench.app) as url:
            return await exchange(url, *pieces)

    head, _, body = run(scenario()).partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head.decode().lower(), body


def request(body: bytes = BODY, method: str = "POST", path: str = "/v1/completions", headers: str = "") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: varve\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /health HTTP/1.1\r\nhost: v\r\ncontent-length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_an_error_of_the_usual_shape(bench, run, serve_app, caplog, nonsense):
    status, head, body = ask(bench, run, serve_app, nonsense)
    assert status == 400
    assert "connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert not caplog.records


@pytest.mark.parametrize(
    "pieces",
    [
        [request(headers="x: " + "a" * 70_000 + "\r\n")],
        [b"GET /health HTTP/1.1\r\nx: ", *[b"a" * 20_000] * 4],
        [b"GET /" + b"a" * 40_000, b"a" * 30_000],
    ],
    ids=["at once", "a header without end", "a path without end"],
)
def test_a_head_that_is_too_large_is_refused(bench, run, serve_app, pieces):
    status, _, body = ask(bench, run, serve_app, *pieces)
    assert status == 431
    assert "headers are larger" in json.loads(body)["error"]["message"]


def test_large_bodies_do_not_count_as_heads(bench, run, serve_app):
    large = BODY[:-1] + b" " * 200_000 + b"}"
    first = request(large).replace(b"connection: close\r\n", b"")
    status, _, body = ask(bench, run, serve_app, first[:1000], first[1000:], first, request(large))
    assert status == 200
    assert body.count(b"HTTP/1.1 200 OK") == 2
    bench.check_idle()


def test_a_head_that_comes_too_slowly_is_refused(bench, run, serve_app, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    status, _, body = ask(bench, run, serve_app, b"GET /health HTTP/1.1\r\n", b"x: a\r\n", b"y: ")
    assert status == 408
    assert "headers did not come" in json.loads(body)["error"]["message"]
    assert ask(bench, run, serve_app)[0] == 0  # nothing came: nothing is said


def test_a_stray_line_end_after_a_body_ends_no_answer(bench, run, serve_app, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    bench.router.step_s = 0.1
    status, _, _ = ask(bench, run, serve_app, request(), b"\r\n")
    assert status == 200


def test_a_body_that_comes_too_slowly_is_refused(bench, run, serve_app, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)
    status, head, body = ask(bench, run, serve_app, request()[:-5])
    assert status == 408
    assert "connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("path", ["/health", "/readiness", "/metrics", "/v1/models"])
def test_head_is_get_without_a_body(bench, run, serve_app, path):
    status, head, body = ask(bench, run, serve_app, request(b"", "HEAD", path))
    assert status == 200
    assert int(head.partition("content-length: ")[2].split()[0]) > 0
    assert body == b""
    requests = bench.service.metrics.requests.values
    assert [labels for labels in requests if labels[0] == "HEAD"] == [("HEAD", path, "200")]
