"""First tokens from every tier, start-up, and requests that are aborted, through a whole server on the GPU.

`python test/gpu/tiers.py OUTPUT_DIR`: serves the Qwen3-8B shape with random weights, a device pool of about two 32k
prompts and a CPU cache that holds all of them. Triton's cache begins empty. Writes `tiers.json`.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/support")]

from real_server import Server, serve  # noqa: E402

SHAPE = ROOT / "test/gpu/shapes/qwen3-8b"
PREFIX, FRESH = 30720, 2048
LENGTH = PREFIX + FRESH
KV_BYTES = 147456  # of a token
NUM_PROMPTS = 4
NUM_ABORTS = 1000
VOCAB = 151000
FLAGS = [
    "--load_format", "dummy", "--device", "cuda", "--max_total_token_num", "76800", "--max_req_total_len", "36864",
    "--enable_cpu_cache", "--cpu_cache_storage_size", "28", "--running_max_req_size", "64",
]  # fmt: skip


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, VOCAB) for _ in range(length)]


def first_token(client: httpx.Client, model: str, tokens: list[int]) -> tuple[float, dict[str, int]]:
    """Seconds from the request to the whole answer of one token, and cached tokens by tier."""
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body).encode()
    begin = time.perf_counter()
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    seconds = time.perf_counter() - begin
    response.raise_for_status()
    return seconds, response.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


def copy_bandwidth() -> float:
    """Bytes a second of one large copy from page-locked memory to the device."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return host.nbytes / min(times)


def settle(server: Server) -> None:
    """Until no request runs and no page is on its way to the CPU."""
    server.wait_until_idle(60)
    time.sleep(1.5)


def measure_tiers(server: Server) -> dict[str, Any]:
    """Medians of first tokens; each prompt is asked for cold, again at once, and again after others took its pages."""
    times: dict[str, list[float]] = {}
    cached: dict[str, dict[str, int]] = {}

    def note(name: str, tokens: list[int]) -> None:
        seconds, tiers = first_token(client, server.model, tokens)
        times.setdefault(name, []).append(seconds)
        cached[name] = tiers

    with server.client() as client:
        first_token(client, server.model, prompt(99))  # plans of cuDNN, memory, page-locking
        settle(server)
        for number in range(NUM_PROMPTS):
            note("cold", prompt(number))
            settle(server)
            for _ in range(3):
                note("device", prompt(number))
        for number in range(NUM_PROMPTS - 2):  # the last two are on the device
            note("cpu", prompt(number))
            settle(server)
        for number in range(2, NUM_PROMPTS):
            note("cpu and fresh", prompt(number)[:PREFIX] + prompt(1000 + number, FRESH))
            settle(server)
        note("short", prompt(7, 64))
    return {
        name: {"seconds": each, "median": statistics.median(each), "cached": cached[name]}
        for name, each in times.items()
    }


async def leave(client: httpx.AsyncClient, model: str, seed: int) -> None:
    """Start a stream and close the connection after a random time."""
    chance = random.Random(seed)
    body = {
        "model": model,
        "prompt": prompt(seed % 50, chance.choice([1, 100, 2000, 9000])),
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": chance.random() < 0.7,
    }
    try:
        async with asyncio.timeout(chance.choice([0.002, 0.02, 0.1, 0.4])):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
    except (TimeoutError, httpx.HTTPError):
        pass


async def leave_many(url: str, model: str, count: int) -> None:
    gate = asyncio.Semaphore(48)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=48)) as client:

        async def one(seed: int) -> None:
            async with gate:
                await leave(client, model, seed)

        await asyncio.gather(*(one(seed) for seed in range(count)))


def check_idle(server: Server) -> list[str]:
    """What is left after the aborts; nothing in a sound server."""
    status = server.wait_until_idle(60)
    problems = [] if not status["num_requests"] else [f"{status['num_requests']} requests"]
    for name in ("router", "cache", "worker-0"):
        client = server.control(name)
        try:
            found = client.call("check")
        finally:
            client.close()
        problems += found["problems"] if isinstance(found, dict) else found
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    bandwidth = copy_bandwidth()
    result: dict[str, Any] = {"h2d_bytes_per_s": bandwidth}
    log = args.output / "tiers-server.log"
    with tempfile.TemporaryDirectory(prefix="vt") as directory:
        begin = time.monotonic()
        environment = {"TRITON_CACHE_DIR": f"{directory}/triton"}
        with serve(Path(directory) / "run", log, str(SHAPE), *FLAGS, **environment) as server:
            result["ready_s"] = time.monotonic() - begin
            with server.client() as client:
                first_token(client, server.model, prompt(5, 100))
            result["start_to_first_answer_s"] = time.monotonic() - begin
            print(
                f"ready after {result['ready_s']:.1f} s, first answer after {result['start_to_first_answer_s']:.1f} s"
            )
            result["first_tokens"] = measure_tiers(server)
            begin = time.monotonic()
            asyncio.run(leave_many(server.url, server.model, NUM_ABORTS))
            result["aborts_s"] = time.monotonic() - begin
            result["left_after_aborts"] = check_idle(server)
    limit = LENGTH // 64 * 64 * KV_BYTES / bandwidth
    for name, each in result["first_tokens"].items():
        single = ", ".join(f"{seconds * 1e3:.1f}" for seconds in each["seconds"])
        print(f"first token, {name:14} {each['median'] * 1e3:9.1f} ms ({single}), cached: {each['cached']}")
    print(f"host to device {bandwidth / 1e9:.1f} GB/s: 32k tokens take {limit * 1e3:.1f} ms at least")
    print(f"{NUM_ABORTS} aborts in {result['aborts_s']:.1f} s; left: {result['left_after_aborts']}")
    print("\n".join(line for line in log.read_text().splitlines() if "ready:" in line or "WARN" in line)[-3000:])
    (args.output / "tiers.json").write_text(json.dumps(result, indent=1))
    return 1 if result["left_after_aborts"] else 0


if __name__ == "__main__":
    sys.exit(main())
