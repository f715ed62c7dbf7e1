"""What only real processes tell: what a step costs beside the worker, and where the worker's time goes."""

import asyncio
from typing import Any

import httpx
import pytest

from serve.bench.cpu_usage import ServerCpu

BATCH = 32
NUM_TOKENS = 48
LARGEST_SHARE = 0.1  # of a step's time


@pytest.fixture(scope="module")
def served(shared_server: Any) -> Any:
    return shared_server()


async def ask_together(url: str, model: str) -> None:
    limits = httpx.Limits(max_connections=BATCH)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(index: int) -> None:
            prompt = f"Story {index}. " * 20
            body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_bytes():
                    pass

        await asyncio.gather(*(one(index) for index in range(BATCH)))


def decode_steps(server: Any) -> tuple[float, float]:
    """Steps so far, and the seconds that the workers took for them."""
    client = server.control("router")
    try:
        found = client.call("statistics")
    finally:
        client.close()
    return found["num_steps"], found["step_s"]["sum"]


def test_router_and_http_process_take_little_cpu_beside_a_step_of_32(served: Any):
    """CPU seconds do not depend on what else the machine does, but for caches that others use too."""
    asyncio.run(ask_together(served.url, served.model))  # what is done once
    cpu = ServerCpu(served.process.pid)
    before = decode_steps(served)
    asyncio.run(ask_together(served.url, served.model))
    seconds, after = cpu.seconds(), decode_steps(served)
    num_steps, step_s = after[0] - before[0], after[1] - before[1]
    assert num_steps >= NUM_TOKENS
    used = seconds["router"] + seconds["httpserver"]
    assert used < LARGEST_SHARE * step_s, (seconds, num_steps, step_s)


def test_a_profile_tells_where_a_worker_s_time_goes(served: Any):
    worker = served.control("worker-0")
    worker.call("profile_start")
    served.complete("The capital of France is", 8, ignore_eos=True)
    found = worker.call("profile_stop")
    assert worker.call("profile_stop") == {}
    worker.close()
    assert set(found) == {"prefill", "decode"}
    assert found["prefill"]["tokens"] == 5
    assert found["decode"]["steps"] >= 7
    kernels, phases = found["decode"]["kernels"], found["decode"]["phases"]
    assert kernels["paged_attention"][0] == 30 * found["decode"]["steps"]  # layers
    assert kernels["logits"][0] == found["decode"]["steps"]
    assert 0 < sum(seconds for _, seconds in kernels.values()) <= phases["forward"]
    assert phases["sample"] < phases["forward"]
