import json
from typing import Any

import pytest

URL = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


def events_of(text: str) -> list[Any]:
    """Events of a stream, without [DONE], which must be the last."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def post(bench, url: str, body: Any, **options: Any):
    async with bench.client() as client:
        response = await client.post(url, json=body, **options)
    return response


async def ask(bench, url: str, body: Any) -> Any:
    response = await post(bench, url, body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(bench, url: str, body: Any) -> list[Any]:
    response = await post(bench, url, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def test_completion_has_openai_shape_and_counts(bench, run):
    bench.router.cached = [16, 32, 64]
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Hi", "max_tokens": 50}))
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello there, world.", "logprobs": None, "finish_reason": "stop"}]
    num_tokens = len(bench.tokenizer.encode("Hello there, world."))
    details = {"cached_tokens": 112, "cached_tokens_by_tier": {"device": 16, "host": 32, "disk": 64}}
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": num_tokens,
        "total_tokens": num_tokens + 1,
        "prompt_tokens_details": details,
    }
    bench.check_idle()


def test_chat_applies_the_template(bench, run):
    body = run(ask(bench, CHAT, HI))
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello there, world.", "refusal": None}
    text = bench.tokenizer.decode(bench.router.seen[0].prompt)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert bench.router.seen[0].sampling.max_tokens == 256 - len(bench.router.seen[0].prompt)


def test_chat_content_parts_are_joined(bench, run):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    run(ask(bench, CHAT, {"model": "smol", "messages": [{"role": "user", "content": parts}]}))
    assert "user\none\ntwo<|im_end|>" in bench.tokenizer.decode(bench.router.seen[0].prompt)


def test_stream_has_role_first_and_finish_reason_last(bench, run):
    events = run(stream(bench, CHAT, HI))
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello there, world."
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


def test_stream_usage_comes_in_a_chunk_without_choices(bench, run):
    bench.router.cached = [0, 0, 16]
    events = run(stream(bench, CHAT, {**HI, "stream_options": {"include_usage": True}}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["disk"] == 16
    assert all(event["usage"] is None for event in events[:-1])


def test_length_is_reported_as_length(bench, run):
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Hi", "max_tokens": 2}))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2
    events = run(stream(bench, URL, {"model": "smol", "prompt": "Hi", "max_tokens": 1}))
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_eos_is_counted_but_not_shown(bench, run):
    eos = next(iter(bench.tokenizer.eos_token_ids))
    bench.router.script = lambda request: [*bench.tokenizer.encode("Bye"), eos]
    bench.router.stops = True
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Hi", "stop_token_ids": [eos], "logprobs": 0}))
    assert body["choices"][0]["text"] == "Bye"
    assert body["choices"][0]["logprobs"]["tokens"] == ["By", "e"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


def test_ends_that_only_the_tokenizer_names_end_a_generation_too(bench, run):
    ends = sorted(bench.tokenizer.eos_token_ids)
    body = {"model": "smol", "prompt": "Hi"}
    run(ask(bench, URL, body))
    run(ask(bench, URL, body | {"stop_token_ids": [9]}))
    run(ask(bench, URL, body | {"stop_token_ids": [9], "ignore_eos": True}))
    assert [request.sampling.stop_token_ids for request in bench.router.seen] == [ends, sorted([*ends, 9]), [9]]


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("Hi", 1), ([19556, 905], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2)],
)
def test_prompt_forms(bench, run, prompt, num_choices):
    body = run(ask(bench, URL, {"model": "smol", "prompt": prompt}))
    assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
    if isinstance(prompt[0], int):
        assert bench.router.seen[0].prompt == prompt


def test_empty_prompt_is_the_begin_token(bench, run):
    run(ask(bench, URL, {"model": "smol", "prompt": ""}))
    assert bench.router.seen[0].prompt == [bench.tokenizer.bos_token_id]


def test_choices_have_seeds_of_their_own_and_do_not_mix(bench, run):
    texts = ["first answer", "second one", "a third"]
    bench.says(*texts)
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Hi there", "n": 3, "seed": 5}))
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [request.sampling.seed for request in bench.router.seen] == [5, 6, 7]
    assert body["usage"]["prompt_tokens"] == 2
    bench.says(*texts)
    events = run(stream(bench, CHAT, {**HI, "n": 3}))
    found = dict.fromkeys(range(3), "")
    for event in events:
        choice = event["choices"][0]
        found[choice["index"]] += choice["delta"].get("content", "")
    assert list(found.values()) == texts
    bench.check_idle()


def test_requests_without_seed_get_different_ones(bench, run):
    for _ in range(2):
        run(ask(bench, URL, {"model": "smol", "prompt": "Hi"}))
    first, second = bench.router.seen
    assert first.sampling.seed != second.sampling.seed


def test_echo_repeats_the_prompt(bench, run):
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Say: ", "echo": True}))
    assert body["choices"][0]["text"] == "Say: Hello there, world."
    events = run(stream(bench, URL, {"model": "smol", "prompt": [19556, 905], "echo": True}))
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello worldHello there, world."


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs_scores_prompt_and_output(bench, run, streamed):
    request = {"model": "smol", "prompt": "Say it: 😀", "echo": True, "logprobs": 2}
    if streamed:
        parts = [event["choices"][0] for event in run(stream(bench, URL, request))]
        text = "".join(part["text"] for part in parts)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        scores = {name: [item for part in parts for item in part["logprobs"][name]] for name in names}
    else:
        choice = run(ask(bench, URL, request))["choices"][0]
        text, scores = choice["text"], choice["logprobs"]
    prompt = bench.router.seen[0].prompt
    assert len(scores["tokens"]) == len(prompt) + len(bench.tokenizer.encode("Hello there, world."))
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in scores["top_logprobs"][1:])
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token
    assert bench.router.seen[0].sampling.prompt_logprobs == 2


def test_max_tokens_zero_generates_nothing(bench, run):
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Hi", "max_tokens": 0, "echo": True, "n": 2}))
    assert [choice["text"] for choice in body["choices"]] == ["Hi", "Hi"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert not bench.router.seen
    events = run(stream(bench, URL, {"model": "smol", "prompt": "Hi", "max_tokens": 0}))
    assert events[0]["choices"][0]["finish_reason"] == "length"


def test_an_echoed_prompt_of_ids_becomes_text_once(bench, run, monkeypatch):
    decoded, decode = [], bench.tokenizer.decode
    monkeypatch.setattr(bench.tokenizer, "decode", lambda ids: decoded.append(ids) or decode(ids))
    request = {"model": "smol", "prompt": [19556, 905], "echo": True, "logprobs": 1}
    events = run(stream(bench, URL, request))
    assert len(events) > 3
    assert events[0]["choices"][0]["text"].startswith(decode([19556, 905]))
    assert decoded == [[19556, 905]]


def test_max_tokens_zero_scores_an_echoed_prompt(bench, run):
    request = {"model": "smol", "prompt": "Hi there", "max_tokens": 0, "echo": True, "logprobs": 1}
    body = run(ask(bench, URL, request))
    choice = body["choices"][0]
    assert choice["text"] == "Hi there"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["Hi", " there"]
    assert body["usage"]["completion_tokens"] == 0
    bench.check_idle()


def test_chat_logprobs_without_and_with_alternatives(bench, run):
    bench.says("Hi 😀")
    body = run(ask(bench, CHAT, {**HI, "logprobs": True}))
    entries = body["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "Hi 😀"
    events = run(stream(bench, CHAT, {**HI, "logprobs": True, "top_logprobs": 3}))
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert all(len(entry["top_logprobs"]) == 3 for entry in streamed)


def test_stop_string_over_tokens_ends_the_request(bench, run):
    bench.says("one two three four")
    body = run(ask(bench, URL, {"model": "smol", "prompt": "Hi", "stop": ["o thr", "four"]}))
    assert body["choices"][0]["text"] == "one tw"
    assert body["choices"][0]["finish_reason"] == "stop"
    finish = bench.router.messages[-1]
    assert finish.num_accepted == 3 == body["usage"]["completion_tokens"]
    events = run(stream(bench, URL, {"model": "smol", "prompt": "Hi", "stop": "o thr"}))
    assert "".join(event["choices"][0]["text"] for event in events) == "one tw"
    included = {"model": "smol", "prompt": "Hi", "stop": "o thr", "include_stop_str_in_output": True}
    assert run(ask(bench, URL, included))["choices"][0]["text"] == "one two thr"
    bench.check_idle()


def test_sampling_fields_reach_the_engine(bench, run):
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "6": 1.5},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9, 8],
        "priority": -3,
        "user": "somebody",
    }
    run(ask(bench, URL, {"model": "smol", "prompt": "Hi", **fields}))
    sampling = bench.router.seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1.0, 1.5, 1.2)
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, [8, 9])
    assert bench.router.seen[0].message.priority == -3


@pytest.mark.parametrize(("top_p", "expected"), [(0, (1, 1.0)), (1, (0, 1.0)), (None, (0, 1.0))])
def test_extreme_top_p(bench, run, top_p, expected):
    run(ask(bench, URL, {"model": "smol", "prompt": "Hi", "top_p": top_p}))
    sampling = bench.router.seen[0].sampling
    assert (sampling.top_k, sampling.top_p) == expected


def test_cache_salt_separates_pages_and_absent_differs_from_empty(bench, run):
    prompt = list(range(100, 140))
    for extra in ({}, {}, {"cache_salt": ""}, {"cache_salt": "a"}):
        run(ask(bench, URL, {"model": "smol", "prompt": prompt, **extra}))
    names = [request.names for request in bench.router.seen]
    assert len(names[0]) == 2
    assert names[0] == names[1]
    assert len({tuple(found) for found in names}) == 3


def test_models_tokenize_and_detokenize(bench, run):
    async def all_of_them():
        async with bench.client() as client:
            models = (await client.get("/v1/models")).json()
            model = (await client.get("/v1/models/smol")).json()
            missing = await client.get("/v1/models/other/one")
            tokens = (await client.post("/tokenize", json={"prompt": "12345"})).json()
            chat = (await client.post("/tokenize", json={"messages": HI["messages"]})).json()
            text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        return models, model, missing, tokens, chat, text

    models, model, missing, tokens, chat, text = run(all_of_them())
    assert models["data"] == [model]
    assert model["max_model_len"] == 256
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert tokens == {"count": 5, "max_model_len": 256, "tokens": [33, 34, 35, 36, 37]}
    assert chat["count"] > 10
    assert text == {"prompt": "12345"}


def test_tools_are_ignored_by_a_template_without_them(bench, run):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    run(ask(bench, CHAT, {**HI, "tools": [tool], "tool_choice": "auto"}))
    assert len(bench.router.seen) == 1
