"""A process is killed under 16 streams: every client gets an end or an error soon, and the server serves again."""

import asyncio
import time
from typing import Any

import httpx
import pytest

NUM_STREAMS = 16
END_DEADLINE_S = 5.0
SERVE_DEADLINE_S = 10.0  # or, where other work shares the cores, twice what the first start took


@pytest.fixture(scope="module")
def served(shared_server: Any) -> Any:
    return shared_server()


async def one_stream(client: httpx.AsyncClient, model: str, index: int, started: asyncio.Event) -> tuple[float, str]:
    """When the stream ended, and how."""
    body = {"model": model, "prompt": f"Story {index}:", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    outcome = "ended"
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                started.set()
                if '"error"' in line:
                    outcome = "error event"
    except httpx.HTTPError as error:
        outcome = type(error).__name__
    return time.monotonic(), outcome


async def kill_under_load(server: Any, role: str) -> tuple[float, list[tuple[float, str]]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [
            asyncio.create_task(one_stream(client, server.model, index, event)) for index, event in enumerate(started)
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in started))
        killed = time.monotonic()
        server.child(role).kill()
        return killed, await asyncio.gather(*streams)


def wait_for_an_answer(server: Any, since: float) -> float:
    """Seconds from `since` until a completion succeeds."""
    while time.monotonic() - since < 60:
        try:
            server.complete("The capital of France is", 4)
            return time.monotonic() - since
        except httpx.HTTPError:
            time.sleep(0.05)
    pytest.fail("the server does not serve again")


def test_torch_is_in_the_workers_only(served: Any):
    def maps_torch(pid: int) -> bool:
        with open(f"/proc/{pid}/maps") as maps:
            return "libtorch" in maps.read()

    assert maps_torch(served.child("worker").pid)
    for role in ("httpserver", "router", "cache"):
        assert not maps_torch(served.child(role).pid), role
    assert not maps_torch(served.process.pid)
    for name, has_torch in (("launcher", False), ("router", False), ("cache", False), ("worker-0", True)):
        client = served.control(name)
        assert client.call("process")["has_torch"] is has_torch, name
        client.close()


@pytest.mark.parametrize("role", ["worker", "httpserver", "router"])
def test_a_killed_process_costs_its_requests_an_error_and_nothing_more(served: Any, role: str):
    killed, ends = asyncio.run(kill_under_load(served, role))
    assert len(ends) == NUM_STREAMS
    assert max(at for at, _ in ends) - killed < END_DEADLINE_S, ends
    assert wait_for_an_answer(served, killed) < max(SERVE_DEADLINE_S, 2 * served.start_s)
    served.wait_until_idle()


def test_the_cache_manager_killed_costs_nothing_at_all(served: Any):
    served.child("cache").kill()
    assert served.complete("The capital of France is", 8)["usage"]["completion_tokens"] == 8
