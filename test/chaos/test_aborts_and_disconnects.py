"""Clients that go away and clients that send nonsense must leave nothing behind and cost nobody else anything."""

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_growth import bytes_a_request
from tiny_engine import save_byte_tokenizer

from unit_tests.models.builders import hf_model, save

NUM_ABORTS = 500
NUM_DISCONNECTS = 200
WARM_UP, NUM_REQUESTS, ROUND = 1000, 3000, 500
MAX_BYTES_A_REQUEST = 1000  # 1 MB in a thousand
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


def test_memory_stays_level_over_many_requests(start_server: Any, tmp_path: Path):
    """RSS of all processes after the first thousand, in which each finds out how much it needs at a time."""
    save(hf_model("llama"), tmp_path)
    save_byte_tokenizer(tmp_path)
    with start_server(model=str(tmp_path)) as server:
        samples = []
        for num_requests in range(0, NUM_REQUESTS + 1, ROUND):
            asyncio.run(ask_often(server.url, server.model, ROUND if num_requests else WARM_UP))
            samples.append((num_requests, sum(process.memory_info().rss for process in server.children())))
    assert bytes_a_request(samples) < MAX_BYTES_A_REQUEST, samples


def rounds(*growths: int) -> list[tuple[int, int]]:
    """Samples whose memory grows by so much in each round."""
    return [(index * ROUND, (500 << 20) + sum(growths[:index])) for index in range(len(growths) + 1)]


def test_what_happens_once_in_a_while_is_no_leak_and_a_leak_is_one_whatever_else_happens():
    level = [4096, 0, 0, 8192, 0, 0]
    assert bytes_a_request(rounds(*level)) < 100
    for place in range(6):
        enlarged = [growth + (4 << 20) * (index == place) for index, growth in enumerate(level)]
        given_back = [growth - (4 << 20) * (index == place) for index, growth in enumerate(level)]
        leaking = [growth + ROUND * 1100 for growth in given_back]
        assert bytes_a_request(rounds(*enlarged)) < MAX_BYTES_A_REQUEST
        assert bytes_a_request(rounds(*leaking)) > MAX_BYTES_A_REQUEST
