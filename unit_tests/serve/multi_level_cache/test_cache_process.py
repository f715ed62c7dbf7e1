"""The real cache manager process, talked to as router and launcher do."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.channel import Inbox, Outbox
from serve.ipc.control import ControlClient
from serve.ipc.messages import ChildReady, ChildStart, EngineDown, EngineUp, Message, Probe, ProbeReply, StopChild
from serve.ipc.pipe import MessagePipe
from serve.ipc.request_table import RequestTable, TableShape
from serve.types import SamplingParams

ROOT = Path(__file__).parents[3]


class CacheProcess:
    def __init__(self, run_dir: Path) -> None:
        self.table = RequestTable.create(TableShape(4, 2048, 16))
        self.pipe, theirs = MessagePipe.pair(send_timeout_s=30)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serve.ipc.child", "cache", "0", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), self.table.fd],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self.pipe.send(ChildStart(1, config(run_dir).model_dump_json().encode(), {}, {"table": self.table.fd}))
        assert self.pipe.receive() == [ChildReady("cache", 0, {})]
        self.to_cache = Outbox(run_dir, "cache")

    def up(self, epoch: int) -> None:
        self.pipe.send(EngineUp(epoch, {"groups": [{"name": "full"}, {"name": "window"}]}))


def config(run_dir: Path) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="m"),
        model_path=Path("m"),
        model_name="m",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=2048,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=4,
    )


@pytest.fixture
def cache(run_dir: Path) -> Iterator[CacheProcess]:
    running = CacheProcess(run_dir)
    yield running
    running.to_cache.close()
    running.process.kill()
    running.process.wait()


def receive(inbox: Inbox) -> list[Message]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if messages := inbox.receive(0.5):
            return messages
    pytest.fail("nothing came")


def call_until(run_dir: Path, method: str, condition: Any) -> Any:
    client = ControlClient(run_dir, "control-cache", timeout_s=20)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        answer = client.call(method)
        if condition(answer):
            client.close()
            return answer
    pytest.fail(f"{method}: {answer}")


def test_a_probe_is_answered_with_a_miss_a_group_and_a_stop_ends_it(cache: CacheProcess, run_dir: Path) -> None:
    router = Inbox(run_dir, "router.1")
    cache.up(1)
    call_until(run_dir, "status", lambda status: status["epoch"] == 1)
    names = [bytes([page]) * 32 for page in range(20)]
    generation = cache.table.fill(2, np.zeros(330, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, names)
    cache.to_cache.send(Probe(6, 2, generation + 1, 20))  # stale: another request has the slot
    cache.to_cache.send(Probe(7, 2, generation, 20))
    assert receive(router) == [ProbeReply(7, *[{"full": bytes(3), "window": bytes(3)}] * 2)]
    statistics = call_until(run_dir, "statistics", bool)
    assert statistics == {"num_probes": 2, "num_stale_probes": 1, "num_pages_asked": 20}
    assert call_until(run_dir, "check", lambda problems: problems == []) == []
    assert call_until(run_dir, "status", bool)["has_torch"] is False
    cache.pipe.send(StopChild(0))
    assert cache.process.wait(20) == 0
    router.close()


def test_after_an_engine_restart_the_new_router_is_answered(cache: CacheProcess, run_dir: Path) -> None:
    cache.up(1)
    cache.pipe.send(EngineDown(1, "a worker died"))
    router = Inbox(run_dir, "router.2")
    cache.up(2)
    call_until(run_dir, "status", lambda status: status["epoch"] == 2)
    generation = cache.table.fill(0, np.zeros(16, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, [b"n" * 32])
    cache.to_cache.send(Probe(1, 0, generation, 1))
    assert receive(router) == [ProbeReply(1, *[{"full": b"\0", "window": b"\0"}] * 2)]
    router.close()
