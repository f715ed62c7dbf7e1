"""Everything a client can get wrong has an error in OpenAI's shape that names the field; nothing is a 500."""

import json
import threading
from typing import Any

import pytest

from serve.httpserver import bodies

URL = "/v1/completions"
CHAT = "/v1/chat/completions"
BASE = {"model": "smol", "prompt": "Hi"}
MESSAGES = [{"role": "user", "content": "hi"}]


async def send(bench, method: str, url: str, **options: Any):
    async with bench.client() as client:
        return await client.request(method, url, **options)


def error_of(response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


COMPLETION_FAULTS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["x"] * 3000}, "prompt"),
    ({"prompt": list(range(300))}, "prompt"),
    ({"prompt": "word " * 300}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"prompt": list(range(256))}, "prompt"),
    ({"max_tokens": 256}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 10**6}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a" * 1000]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [1] * 200}, "stop_token_ids"),
    ({"stop_token_ids": [50_000]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"60000": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"user": 5}, "user"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"tempratur": 1}, "tempratur"),
    ({"messages": MESSAGES}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), COMPLETION_FAULTS, ids=lambda value: str(value)[:40])
def test_completion_names_the_field(bench, run, change, param):
    response = run(send(bench, "POST", URL, json={**BASE, **change}))
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    bench.check_idle()


CHAT_FAULTS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 256}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), CHAT_FAULTS, ids=lambda value: str(value)[:40])
def test_chat_names_the_field(bench, run, change, param):
    response = run(send(bench, "POST", CHAT, json={"model": "smol", "messages": MESSAGES, **change}))
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    bench.check_idle()


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_fields_are_named(bench, run, missing):
    body = {name: value for name, value in BASE.items() if name != missing}
    error = error_of(run(send(bench, "POST", URL, json=body)))
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


BROKEN_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b'{"model": "smol", "prompt": NaN}',
    b'{"model": "smol", "prompt": "Hi", "temperature": NaN}',
    b'{"model": "smol", "prompt": "Hi", "temperature": Infinity}',
    b'{"model": "smol", "prompt": "Hi", "temperature": 1e999}',
    b'{"model": "smol", "prompt": "\xff\xfe"}',
    b'{"model": "smol", "prompt": "\xc3"}',
    b'{"model": "smol", "prompt": "\xed\xa0\x80"}',
    b'{"model": "smol", "prompt": "a\\ud800b"}',
    b'{"model": "smol", "prompt": "a\\udc00"}',
    b'{"model": "smol", "prompt": "\\ud800\\ud800xx"}',
    b'{"model": "smol", "prompt": "x", "\\ud800xxxxxx": 1}',
    b"[" * 100_000,
    b'{"model": "smol", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"a":' * 50_000,
    b'{"model": "smol", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'\xef\xbb\xbf{"model": "smol", "prompt": "x"}',
    b'{"model": "smol", "prompt": "x"} trailing',
]


@pytest.mark.parametrize("body", BROKEN_BODIES, ids=lambda body: repr(body[:60]))
@pytest.mark.parametrize("url", [URL, CHAT, "/tokenize", "/detokenize"])
def test_broken_bodies(bench, run, url, body):
    response = run(send(bench, "POST", url, content=body, headers={"content-type": "application/json"}))
    assert response.status_code == 400, response.text
    error_of(response)


def test_strange_but_valid_text_is_accepted(bench, run):
    for prompt in ("\x00\x01", "\ufeff", "\u202e", "😀" * 20, "e\u0301" * 10, "\ud7ff\ue000\ufffd", "﷽"):
        response = run(send(bench, "POST", URL, json={**BASE, "prompt": prompt, "echo": True}))
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"].startswith(prompt)


def test_large_bodies_are_refused_early(build, run):
    bench = build(body_limit=10_000)
    response = run(send(bench, "POST", URL, json={**BASE, "prompt": "x" * 20_000}))
    assert response.status_code == 413
    error_of(response)

    async def endless():
        for _ in range(100):
            yield b" " * 1000

    response = run(send(bench, "POST", URL, content=endless(), headers={"content-type": "application/json"}))
    assert response.status_code == 413


def test_other_media_types_are_refused(bench, run):
    response = run(send(bench, "POST", URL, content=b"prompt=Hi", headers={"content-type": "text/plain"}))
    assert response.status_code == 415
    error_of(response)


def test_unknown_model_path_and_method(bench, run):
    response = run(send(bench, "POST", URL, json={**BASE, "model": "gpt-5"}))
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"
    response = run(send(bench, "GET", "/v1/nothing"))
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    response = run(send(bench, "GET", URL))
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    error_of(response)


def test_api_key(build, run):
    bench = build(api_key="sécret")
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic x"},
        {"authorization": "Bearer é".encode()},
    ):
        response = run(send(bench, "POST", URL, json=BASE, headers=headers))
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
    bench = build(api_key="secret")
    assert run(send(bench, "POST", URL, json=BASE, headers={"authorization": "Bearer secret"})).status_code == 200
    assert run(send(bench, "GET", "/health")).status_code == 200


def test_admin_routes_need_their_own_key(build, run):
    assert run(send(build(), "GET", "/admin/status")).status_code == 403
    bench = build(admin_api_key="boss", api_key="user")
    assert run(send(bench, "GET", "/admin/status", headers={"authorization": "Bearer user"})).status_code == 401
    headers = {"authorization": "Bearer boss"}
    assert run(send(bench, "GET", "/admin/status", headers=headers)).status_code == 503
    assert run(send(bench, "GET", "/admin/status?part=moon", headers=headers)).status_code == 404


def test_queue_full_is_429_and_a_bad_request_keeps_its_status(bench, run):
    for stream in (False, True):
        bench.router.refuse = (429, "the queue is full")
        response = run(send(bench, "POST", URL, json={**BASE, "stream": stream}))
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert error_of(response)["code"] == "queue_full"
        bench.router.refuse = (400, "too long for the pool")
        assert run(send(bench, "POST", URL, json={**BASE, "stream": stream})).status_code == 400
    bench.check_idle()


def test_a_mailbox_that_does_not_read_is_503(bench, run):
    bench.router.full = True
    response = run(send(bench, "POST", URL, json=BASE))
    assert response.status_code == 503
    error_of(response)
    assert bench.service.num_active == 0


def test_engine_down_is_503_with_retry_after(build, run):
    bench = build(up=False)
    for method, url in (("POST", URL), ("GET", "/health"), ("GET", "/readiness")):
        response = run(send(bench, method, url, json=BASE))
        assert response.status_code == 503
        assert response.headers["retry-after"]
        error_of(response)
    bench.engine_up()
    assert run(send(bench, "POST", URL, json=BASE)).status_code == 200


def test_request_id_is_returned_when_it_is_plain(bench, run):
    response = run(send(bench, "POST", URL, json=BASE, headers={"x-request-id": "my-id.7"}))
    assert response.headers["x-request-id"] == "my-id.7"
    assert response.json()["id"] == "cmpl-my-id.7"
    assert bench.router.seen[-1].message.request_id == "my-id.7"
    for bad in ("", "a b", "x" * 200, "é".encode(), '"'):
        response = run(send(bench, "POST", URL, json=BASE, headers={"x-request-id": bad}))
        assert len(response.headers["x-request-id"]) == 32


def test_a_template_that_refuses_is_a_400(bench, run):
    from serve.httpserver.chat_template import ChatTemplate

    before = bench.tokenizer.chat_template
    try:
        for source in (
            "{{ raise_exception('no system role') }}",
            "{{ messages[99].role.x }}",
            "{{ 1 / 0 }}",
            "{{ [].append(1) }}",
        ):
            bench.tokenizer.chat_template = ChatTemplate(source, {})
            response = run(send(bench, "POST", CHAT, json={"model": "smol", "messages": MESSAGES}))
            assert response.status_code == 400, response.text
            assert error_of(response)["param"] == "messages"
        bench.tokenizer.chat_template = None
        response = run(send(bench, "POST", CHAT, json={"model": "smol", "messages": MESSAGES}))
        assert "no chat template" in error_of(response)["message"]
    finally:
        bench.tokenizer.chat_template = before


def test_error_bodies_are_json(bench, run):
    response = run(send(bench, "GET", "/v1/models/%FF%00%ED%A0%80"))
    assert response.status_code == 404
    assert json.loads(response.content)


def test_a_text_that_can_never_be_a_prompt_is_not_tokenized(bench, run):
    async def scenario():
        async with bench.client() as client:
            text = "a" * (bench.tokenizer.max_token_chars * 256 + 1)
            return await client.post("/tokenize", json={"prompt": text})

    response = run(scenario())
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_one_prompt_that_is_too_long_is_refused_before_the_others_are_tokenized(bench, run, monkeypatch):
    tokenized = []
    encode = bench.tokenizer.encode
    monkeypatch.setattr(
        bench.tokenizer, "encode", lambda text, special: tokenized.append(text) or encode(text, special)
    )

    async def scenario():
        async with bench.client() as client:
            return await client.post("/v1/completions", json={"model": "smol", "prompt": ["a " * 300] * 5})

    assert run(scenario()).status_code == 400
    assert len(tokenized) == 1


@pytest.mark.parametrize(
    ("url", "body", "is_beside"),
    [
        (URL, {**BASE, "prompt": "Hi"}, False),
        (URL, {**BASE, "prompt": ["some words"] * 500}, True),
        (CHAT, {"model": "smol", "messages": MESSAGES}, False),
        (CHAT, {"model": "smol", "messages": MESSAGES * 500}, True),
        (CHAT, {"model": "smol", "messages": [{**MESSAGES[0], "name": "x"}]}, True),
    ],
)
def test_what_takes_long_is_tokenized_beside_the_event_loop(bench, run, monkeypatch, url, body, is_beside):
    threads = set()
    encode = bench.tokenizer.encode
    monkeypatch.setattr(
        bench.tokenizer,
        "encode",
        lambda text, special: threads.add(threading.current_thread().name) or encode(text, special),
    )
    run(send(bench, "POST", url, json=body))
    assert len(threads) == 1
    assert ("MainThread" not in threads) == is_beside


def test_large_bodies_are_decoded_beside_the_event_loop(bench, run, monkeypatch):
    threads = set()
    decode = bodies.decode_json
    monkeypatch.setattr(
        bodies, "decode_json", lambda body: threads.add(threading.current_thread().name) or decode(body)
    )

    async def scenario():
        async with bench.client() as client:
            return await client.post("/detokenize", json={"tokens": [19556] * 100_000})

    response = run(scenario())
    assert response.json() == {"prompt": "Hello" * 100_000}
    assert "MainThread" not in threads
