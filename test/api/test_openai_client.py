"""The official client, synchronous and asynchronous, against the real server and real weights."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

PROMPT = "The capital of France is"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def served(shared_server: Any) -> Any:
    """In float32, so that texts do not depend on the batch that a request happens to be in."""
    return shared_server("--data_type", "float32")


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    assert client.models.retrieve(only.id).id == only.id
    return only.id


def test_a_completion_knows_paris(client: openai.OpenAI, model: str):
    answer = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_chat_knows_paris_and_ends_by_itself(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=100)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


def test_a_server_as_it_is_by_default_knows_paris(shared_server: Any):
    """The answer that the README promises after `make serve`: no flags, bfloat16."""
    served = shared_server()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        answer = made.chat.completions.create(model=served.model, messages=QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_streams_say_what_whole_answers_say(client: openai.OpenAI, model: str):
    whole = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    chunks = list(client.completions.create(model=model, prompt=PROMPT, **GREEDY, **STREAM))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_streams_say_what_whole_chats_say(client: openai.OpenAI, model: str):
    whole = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    chunks = list(client.chat.completions.create(model=model, messages=QUESTION, **GREEDY, **STREAM))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert deltas[0].role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]


def test_several_choices_differ_and_are_repeatable(client: openai.OpenAI, model: str):
    options: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3}
    first, second = (client.completions.create(model=model, **options) for _ in range(2))
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({choice.text for choice in first.choices}) == 3
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(model=model, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == [choice.text for choice in first.choices]


def test_logprobs_of_completions_are_those_of_a_greedy_choice(client: openai.OpenAI, model: str):
    answer = client.completions.create(model=model, prompt=PROMPT, logprobs=3, **GREEDY).choices[0]
    found = answer.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == answer.text
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob == top[token] == max(top.values()) <= 0
        assert len(top) == 3


def test_logprobs_of_chats(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(model=model, messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert answer.usage is not None
    for entry in found.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token
    text = b"".join(bytes(entry.bytes or []) for entry in found.content).decode()
    assert text.startswith(answer.choices[0].message.content or "?")


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: str):
    whole = client.completions.create(model=model, prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    before = whole[: whole.index(stop)]
    answer = client.completions.create(model=model, prompt=PROMPT, stop=[stop, "no such text"], **GREEDY).choices[0]
    assert (answer.text, answer.finish_reason) == (before, "stop")
    chunks = client.completions.create(model=model, prompt=PROMPT, stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == before


def test_usage_tells_what_came_from_the_cache(client: openai.OpenAI, model: str):
    prompt, extra = [11] * 130, {"cache_salt": "openai client"}
    options: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1, "extra_body": extra}
    details = [client.completions.create(**options).usage.prompt_tokens_details for _ in range(2)]  # type: ignore[union-attr]
    assert [detail.cached_tokens for detail in details if detail] == [0, 128]


def test_errors_are_the_client_s_own(client: openai.OpenAI, model: str):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=1 << 20)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=QUESTION, stream=True, max_tokens=-1)


def test_the_asynchronous_client_gets_the_same_from_many_at_once(served: Any, client: openai.OpenAI, model: str):
    expected = client.completions.create(model=model, prompt=PROMPT, **GREEDY).choices[0].text
    chat = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY).choices[0].message.content

    async def run() -> tuple[list[str], list[str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as other:

            async def whole() -> str:
                return (await other.completions.create(model=model, prompt=PROMPT, **GREEDY)).choices[0].text

            async def streamed() -> str:
                stream = await other.completions.create(model=model, prompt=PROMPT, **GREEDY, **STREAM)
                return "".join([choice.text async for chunk in stream for choice in chunk.choices])

            async def streamed_chat() -> str:
                stream = await other.chat.completions.create(model=model, messages=QUESTION, **GREEDY, **STREAM)
                return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

            texts = await asyncio.gather(*(whole() for _ in range(4)), *(streamed() for _ in range(4)))
            return list(texts), list(await asyncio.gather(*(streamed_chat() for _ in range(4))))

    texts, chats = asyncio.run(run())
    assert texts == [expected] * 8
    assert chats == [chat] * 4


def test_a_stream_that_is_closed_early_is_aborted(served: Any, client: openai.OpenAI, model: str):
    with client.completions.create(model=model, prompt=PROMPT, max_tokens=4000, stream=True) as stream:
        next(iter(stream))
    served.wait_until_idle(5.0)
