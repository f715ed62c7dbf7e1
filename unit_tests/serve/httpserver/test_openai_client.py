"""The official client, as users call it."""

import asyncio
import threading

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def address(bench, serve_app):
    """The app on loopback, in a thread with a loop of its own."""
    started, stop, found = threading.Event(), threading.Event(), {}

    async def main():
        async with serve_app(bench.app) as url:
            found["url"] = url
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(10)
    yield found["url"] + "/v1"
    stop.set()
    thread.join(10)


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


def test_chat(client, bench):
    answer = client.chat.completions.create(
        model="smol", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "Hello there, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="smol", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "Hello there, world.", 1: "Hello there, world."}
    assert reasons == {0: "stop", 1: "stop"}
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_completions(client):
    answer = client.completions.create(model="smol", prompt=["a", "b"], echo=True, logprobs=1, seed=1)
    assert [choice.text for choice in answer.choices] == ["aHello there, world.", "bHello there, world."]
    stream = client.completions.create(model="smol", prompt="a", stream=True, stop=["world"])
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello there, "


def test_models_and_errors(client, bench):
    assert [model.id for model in client.models.list()] == ["smol"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smol", messages=MESSAGES, max_tokens=10_000)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"
    bench.router.refuse = (429, "full")
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="smol", messages=MESSAGES)


def test_answered_messages_can_be_sent_back(client):
    first = client.chat.completions.create(model="smol", messages=MESSAGES)
    history = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(model="smol", messages=history).choices[0].message.content


def test_async_client(address):
    async def scenario():
        async with openai.AsyncOpenAI(base_url=address, api_key="none") as client:

            async def one():
                stream = await client.chat.completions.create(model="smol", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            whole = await client.chat.completions.create(model="smol", messages=MESSAGES)
            return [whole.choices[0].message.content, *await asyncio.gather(*(one() for _ in range(6)))]

    assert set(asyncio.run(scenario())) == {"Hello there, world."}
