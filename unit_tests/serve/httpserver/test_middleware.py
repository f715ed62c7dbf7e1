"""What surrounds every request: its id, its log line, its count, and an answer to errors that nobody expected."""

import httpx
import pytest

from serve import log
from serve.httpserver.answers import CompletionAnswer

URL = "/v1/completions"
BODY = {"model": "smol", "prompt": "Hi", "max_tokens": 20}
NAMED = {"x-request-id": "my-id.7"}


async def send(bench, method: str, url: str, **options) -> httpx.Response:
    async with bench.client() as client:
        return await client.request(method, url, **options)


def test_a_request_is_one_log_line_that_names_it(bench, run, capsys, restored_logging):
    log.set_up("http-0", "info")
    run(send(bench, "POST", URL, json=BODY, headers=NAMED))
    run(send(bench, "GET", "/health"))  # asked for every few seconds: no line
    (line,) = capsys.readouterr().out.splitlines()
    assert f"INFO     http-0 [my-id.7] POST {URL} 200 " in line


def test_an_unexpected_error_is_a_500_with_the_request_s_id_and_a_trace(bench, run, caplog, monkeypatch):
    def fail(spec):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(bench.service, "start", fail)
    response = run(send(bench, "POST", URL, json=BODY, headers=NAMED))
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "my-id.7"
    assert response.json()["error"]["type"] == "server_error"
    assert "a bug" not in response.text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    assert bench.service.metrics.requests.values["POST", URL, "500"] == 1


def test_an_unexpected_error_cuts_a_stream_that_has_begun(bench, run, serve_app, caplog, monkeypatch):
    def fail(answer, usage):
        raise ZeroDivisionError("a bug")

    async def scenario() -> str:
        monkeypatch.setattr(CompletionAnswer, "end", fail)
        async with serve_app(bench.app) as url, httpx.AsyncClient() as client:
            return (await client.post(url + URL, json={**BODY, "stream": True})).text

    with pytest.raises(httpx.RemoteProtocolError):
        run(scenario())
    assert bench.service.metrics.requests.values["POST", URL, "200"] == 1
    bench.check_idle()
