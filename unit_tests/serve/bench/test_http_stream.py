import asyncio
import socket

import pytest

from serve.bench.flags import BenchError
from serve.bench.http_stream import FailureKind, Response, Target, exchange
from unit_tests.serve.bench.fake_server import FakeServer, Script, chunk, head, plain


def ask(script: Script, timeout: float = 10.0) -> Response:
    with FakeServer(lambda path, body: script) as server:
        target = Target.parse(server.base_url)
        return asyncio.run(exchange(target, target.encode("GET", "/x", b"", None), timeout))


def test_a_chunked_body_is_read_whatever_the_pieces() -> None:
    raw = head() + chunk(b"abc") + chunk(b"0\r\n\r\n") + b"0\r\n\r\n"
    for size in (1, 2, 7, len(raw)):
        script = [(0.002, raw[i : i + size]) for i in range(0, len(raw), size)]
        response = ask(script)
        assert (response.status, response.body, response.failure) == (200, b"abc0\r\n\r\n", None)


def test_pieces_carry_the_time_they_came() -> None:
    response = ask([(0.0, head()), (0.05, chunk(b"a")), (0.05, chunk(b"b")), (0.0, b"0\r\n\r\n")])
    (first, a), (second, b) = response.reads
    assert (a, b) == (b"a", b"b")
    assert first - response.start >= 0.05
    assert second - first >= 0.04
    assert response.end >= second


def test_a_body_with_a_length_and_one_up_to_the_close_are_complete() -> None:
    assert ask(plain("404 Not Found", b"no")).failure is None
    response = ask([(0.0, head(extra="") + b"abc"), (0.01, b"def")])
    assert (response.body, response.failure) == (b"abcdef", None)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([(0.0, head() + chunk(b"abc"))], FailureKind.DISCONNECTED),
        ([(0.0, head(extra="Content-Length: 9\r\n") + b"abc")], FailureKind.DISCONNECTED),
        ([], FailureKind.DISCONNECTED),
        ([(0.0, b"SMTP ready\r\n\r\n")], FailureKind.PROTOCOL),
        ([(0.0, head()), (5.0, b"")], FailureKind.TIMEOUT),
    ],
)
def test_a_broken_answer_is_told_by_its_kind(script: Script, kind: FailureKind) -> None:
    response = ask(script, timeout=0.3)
    assert response.failure is not None
    assert response.failure.kind is kind
    assert response.end > response.start


def test_no_server_is_a_failure_to_connect() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = Target("127.0.0.1", unused.getsockname()[1], False, "")
        response = asyncio.run(exchange(target, b"", 5.0))
    assert response.failure is not None
    assert response.failure.kind is FailureKind.CONNECT


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:81", Target("a", 81, False, "")),
        ("http://a/v1/", Target("a", 80, False, "")),
        ("https://a/b/v1", Target("a", 443, True, "/b")),
        ("http://[::1]:9", Target("::1", 9, False, "")),
    ],
)
def test_base_urls(url: str, expected: Target) -> None:
    assert Target.parse(url) == expected


@pytest.mark.parametrize("url", ["a:80", "ftp://a", "http://", "http://a:x"])
def test_a_bad_base_url_is_one_line(url: str) -> None:
    with pytest.raises(BenchError, match="--base_url"):
        Target.parse(url)


def test_a_request_names_host_length_and_key() -> None:
    request = Target.parse("http://[::1]:9/p").encode("POST", "/v1/x", b"{}", "secret")
    first, *headers = request.removesuffix(b"\r\n\r\n{}").decode().split("\r\n")
    assert first == "POST /p/v1/x HTTP/1.1"
    assert {"Host: [::1]:9", "Content-Length: 2", "Authorization: Bearer secret"} <= set(headers)
