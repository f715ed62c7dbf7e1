"""Clients that go away and clients that send nonsense must leave nothing behind and cost nobody else anything."""

import asyncio
import contextlib
import json
import random
import statistics
from typing import Any

import httpx
import pytest

NUM_ABORTS = 500
NUM_DISCONNECTS = 200
ROUND, NUM_ROUNDS = 200, 5  # requests
MAX_BYTES_A_REQUEST = 1 << 10
BAD_BODIES: list[Any] = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 1}', b"{'a': 1}", b'"x"',
    b"{}", b'{"prompt": "a"}', {"model": "no-such-model", "prompt": "a"},
    *[{"prompt": "a", field: value} for field, value in [
        ("max_tokens", -1), ("max_tokens", "many"), ("max_tokens", 1 << 40), ("max_tokens", 1.5), ("temperature", -1),
        ("temperature", "hot"), ("temperature", 1e9), ("top_p", -0.1), ("top_p", 2), ("top_k", -5), ("min_p", 3),
        ("n", 0), ("n", 1 << 20), ("n", "two"), ("stop", 5), ("stop", [1]), ("stop", ["x"] * 1000), ("logprobs", -1),
        ("logprobs", 10**6), ("logit_bias", {"a": 1}), ("logit_bias", {"5": 1000}), ("logit_bias", {"99999999": 1}),
        ("seed", "x"), ("stream", "yes"), ("stream_options", 7), ("no_such_field", 1),
        ("presence_penalty", 100), ("frequency_penalty", -100),
        ("repetition_penalty", 0), ("echo", "x"),
    ]],
    {"prompt": 5}, {"prompt": [[1], "a"]}, {"prompt": [-1]}, {"prompt": [10**9]}, {"prompt": [1.5]},
    {"prompt": {"a": 1}}, {"prompt": "a b" * 9000}, {"prompt": [5] * 9000}, {"prompt": []}, {"prompt": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def served(shared_server: Any) -> Any:
    return shared_server()


def check_all_idle_and_whole(server: Any) -> None:
    """No page, plan or slot in use, and every process's own integrity check holds."""
    server.wait_until_idle()
    for name in ("router", "cache", "worker-0"):
        client = server.control(name)
        try:
            assert client.call("check") in ([], {"problems": []}), name
        finally:
            client.close()


async def stream_and_leave(client: httpx.AsyncClient, model: str, seed: int) -> None:
    """Start a stream and close the connection after a random time, in whatever state the request is then."""
    chance = random.Random(seed)
    prompt = " ".join(str(chance.randrange(1000)) for _ in range(chance.choice([1, 20, 300])))
    body = {"model": model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": chance.random() < 0.7}
    with contextlib.suppress(asyncio.TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(chance.choice([0.0, 0.01, 0.1, 0.5, 1.5]) + 0.001):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass


async def leave_many(url: str, model: str, count: int) -> None:
    limits = httpx.Limits(max_connections=48)
    gate = asyncio.Semaphore(48)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def one(seed: int) -> None:
            async with gate:
                await stream_and_leave(client, model, seed)

        await asyncio.gather(*(one(seed) for seed in range(count)))


@pytest.mark.parametrize("count", [NUM_ABORTS, NUM_DISCONNECTS])
def test_requests_that_are_aborted_at_random_moments_leave_nothing(served: Any, count: int):
    asyncio.run(leave_many(served.url, served.model, count))
    check_all_idle_and_whole(served)
    assert served.complete("The capital of France is", 4)["choices"][0]["text"]


def test_bad_bodies_get_a_4xx_in_openai_shape(served: Any):
    with served.client() as client:
        for body in BAD_BODIES:
            whole = body if isinstance(body, bytes) else {"model": served.model, "max_tokens": 1} | body
            content = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
            response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert 400 <= response.status_code < 500, (body if len(content) < 200 else len(content), response.text)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    check_all_idle_and_whole(served)


async def ask_often(url: str, model: str, count: int) -> None:
    gate = asyncio.Semaphore(32)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(index: int) -> None:
            async with gate:
                body = {"model": model, "prompt": f"{index} is", "max_tokens": 2, "ignore_eos": True}
                (await client.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(one(index) for index in range(count)))


def test_memory_stays_level_over_many_requests(served: Any):
    """Of rounds of requests most leave the RSS of all processes where it was: a leak would show in each of them.

    In single rounds it may rise, when an allocator or a pool reaches for memory that it keeps.
    """
    growths, before = [], 0
    for _ in range(1 + NUM_ROUNDS):
        asyncio.run(ask_often(served.url, served.model, ROUND))
        after = sum(process.memory_info().rss for process in served.children())
        growths.append(after - before)
        before = after
    assert statistics.median(growths[1:]) < ROUND * MAX_BYTES_A_REQUEST, growths
