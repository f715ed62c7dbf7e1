"""A whole worker process behind its pipe and its mailboxes, with the tiny llama."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.config import load_model_config
from models.source import resolve_model
from models.state_layout import derive_layout
from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.channel import Inbox, Outbox
from serve.ipc.control import ControlClient
from serve.ipc.messages import (
    CancelJob,
    ChildFailed,
    ChildReady,
    ChildStart,
    JobAnswer,
    JoinRow,
    LoadPages,
    Message,
    Progress,
    Resync,
    SlotsInUse,
    StepPlan,
    StepResult,
    StopChild,
    StorePages,
)
from serve.ipc.pipe import MessagePipe
from serve.ipc.request_table import RequestTable, TableShape
from serve.launcher.arena import arena_fds
from serve.multi_level_cache.host_arena import ArenaHeaders, HostArena, arena_shape
from serve.multi_level_cache.object_format import object_formats
from serve.types import JobId, JobResult
from unit_tests.serve.model_infer.builders import greedy
from unit_tests.serve.model_infer.tiny_llama import follows_greedily, model_dir, random_prompt

ROOT = Path(__file__).parents[3]
EPOCH = 3


class WorkerProcess:
    """A worker and the ends of its lines that launcher and router have."""

    def __init__(self, run_dir: Path, arena: HostArena | None = None, **flags: object) -> None:
        self.run_dir = run_dir
        fds = arena_fds(arena)
        self.table = RequestTable.create(TableShape(num_slots=4, max_tokens=256, page_size=16))
        self.router = Inbox(run_dir, f"router.{EPOCH}")
        self.cache = Inbox(run_dir, "cache")
        self.plans = Outbox(run_dir, f"worker-0.{EPOCH}")
        self.jobs = Outbox(run_dir, f"pages-0.{EPOCH}")
        self.pipe, theirs = MessagePipe.pair(send_timeout_s=60)
        with theirs:
            command = [sys.executable, "-P", "-m", "serve.ipc.child", "worker", "0", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), self.table.fd, *fds.values()],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
        source = resolve_model(str(model_dir()), "auto", offline=True)
        model = {
            "config": load_model_config(source).to_dict(),
            "source": msgspec.to_builtins(source, enc_hook=str),
        }
        config = make_config(run_dir, **flags).model_dump_json().encode()
        self.pipe.send(ChildStart(EPOCH, config, model, {"table": self.table.fd, **fds}))

    def wait_for(self, kind: type[Message]) -> Message:
        """The first message of this kind over the pipe; Progress before it is skipped."""
        while True:
            for message in self.pipe.receive():
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Progress), message

    def answers(self, inbox: Inbox, count: int) -> list[Message]:
        messages: list[Message] = []
        deadline = time.monotonic() + 30
        while len(messages) < count and time.monotonic() < deadline:
            messages += inbox.receive(1.0)
        assert len(messages) == count
        return messages

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for mailbox in (self.router, self.cache, self.plans, self.jobs):
            mailbox.close()
        self.pipe.close()
        self.table.close()


def make_config(run_dir: Path, **flags: object) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="tiny", running_max_req_size=4, **flags),  # type: ignore[arg-type]
        model_path=model_dir(),
        model_name="tiny",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=128,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=4,
    )


@pytest.fixture
def start(run_dir: Path) -> Iterator[type[WorkerProcess]]:
    started: list[WorkerProcess] = []

    def make(**options: object) -> WorkerProcess:
        started.append(WorkerProcess(run_dir, **options))  # type: ignore[arg-type]
        return started[-1]

    yield make  # type: ignore[misc]
    for worker in started:
        worker.close()


def test_a_worker_from_start_to_stop(start: type[WorkerProcess]):
    worker = start()
    ready = worker.wait_for(ChildReady)
    assert isinstance(ready, ChildReady)
    assert set(ready.info) == {"block_digests", "num_pages", "memory", "phases", "copy_bytes_per_s"}
    assert ready.info["num_pages"]["full"] == -(-(2 * 129 + 4 * 256) // 16)
    check_texts(worker)
    check_jobs(worker)
    check_control(worker)
    worker.pipe.send(StopChild(0))
    assert worker.process.wait(10) == 0


def check_texts(worker: WorkerProcess) -> None:
    """Two plans ahead, as the router sends them; all results come, in order."""
    prompt = random_prompt(20, 1)
    generation = worker.table.fill(1, np.array(prompt, dtype=np.uint32), greedy(), bytes(32), [])
    worker.plans.send(StepPlan(EPOCH, 0, joins=[JoinRow(2, 1, generation, 20, 20, 0, {"full": [5, 3, 9]})]))
    worker.plans.send(StepPlan(EPOCH, 1, chunks=[(2, 12)]))
    worker.plans.send(StepPlan(EPOCH, 2, chunks=[(2, 8)]))
    for step in range(3, 12):
        worker.plans.send(StepPlan(EPOCH, step))
    results = worker.answers(worker.router, 12)
    assert all(isinstance(result, StepResult) for result in results)
    assert [result.step for result in results] == list(range(12))
    tokens = [token for result in results for token in result.token_ids]
    assert len(tokens) == 10
    assert follows_greedily(prompt, tokens)


def check_jobs(worker: WorkerProcess) -> None:
    """Without a host tier each job is refused once; cancelling it adds no second answer."""
    job = JobId(EPOCH, 1)
    worker.jobs.send(LoadPages(job, "full", [1], [1], [1], 0, 2))
    worker.jobs.send(CancelJob(job))
    worker.jobs.send(Resync(7))
    refusal = JobAnswer(job, 0, JobResult.FAILED, "no host tier")
    assert worker.answers(worker.cache, 2) == [refusal, SlotsInUse(7, 0, [], [])]
    assert worker.answers(worker.router, 1) == [refusal]


def check_control(worker: WorkerProcess) -> None:
    client = ControlClient(worker.run_dir, "control-worker-0")
    status = client.call("status")
    assert (status["num_rows"], status["num_steps"], status["num_tokens"]) == (1, 12, 29)
    assert client.call("memory")["resident"] > 1 << 20
    assert client.call("check") == []
    client.close()


@pytest.mark.parametrize("is_sync", [False, True])
def test_pages_go_to_the_host_tier_and_another_request_runs_on_them(start: type[WorkerProcess], is_sync: bool):
    formats = object_formats(derive_layout(load_model_config(resolve_model(str(model_dir()))), 16, "float32"))
    arena = HostArena.create(arena_shape(formats, 1 << 20))
    headers = ArenaHeaders(arena, arena.begin_management())
    worker = start(arena=arena, enable_cpu_cache=True, cpu_cache_sync=is_sync)
    ready = worker.wait_for(ChildReady)
    assert isinstance(ready, ChildReady)
    assert set(ready.info["copy_bytes_per_s"]) == {"load", "store"}
    prompt = random_prompt(40, 1)
    generation = worker.table.fill(1, np.array(prompt, dtype=np.uint32), greedy(), bytes(32), [])
    generations = [headers.assign([slot], bytes([slot]) * 32)[0] for slot in (6, 7)]
    store, load = JobId(EPOCH, 1), JobId(EPOCH, 2)
    worker.jobs.send(StorePages(store, "full", [5, 3], [6, 7], generations, after_step=1))
    worker.plans.send(StepPlan(EPOCH, 0, joins=[JoinRow(2, 1, generation, 40, 40, 0, {"full": [5, 3, 9]})]))
    worker.plans.send(StepPlan(EPOCH, 1, chunks=[(2, 40)]))
    done = JobAnswer(store, 0, JobResult.DONE)
    messages = worker.answers(worker.router, 3)
    answers = [message for message in messages if isinstance(message, JobAnswer)]
    assert [type(message) for message in messages if message not in answers] == [StepResult, StepResult]
    assert [*answers, *worker.answers(worker.cache, 1)] == [done, done]
    worker.jobs.send(LoadPages(load, "full", [11, 12], [6, 7], generations, 0, 2))
    done = JobAnswer(load, 0, JobResult.DONE)
    assert [*worker.answers(worker.router, 1), *worker.answers(worker.cache, 1)] == [done, done]
    worker.plans.send(StepPlan(EPOCH, 2, [2], [JoinRow(0, 1, generation, 40, 40, 32, {"full": [11, 12, 20]})]))
    worker.plans.send(StepPlan(EPOCH, 3, chunks=[(0, 8)]))
    for step in range(4, 8):
        worker.plans.send(StepPlan(EPOCH, step))
    results = worker.answers(worker.router, 6)
    assert follows_greedily(prompt, [token for result in results for token in result.token_ids])
    worker.jobs.send(Resync(2))
    assert worker.answers(worker.cache, 1) == [SlotsInUse(2, 0, [], [])]
    client = ControlClient(worker.run_dir, "control-worker-0")
    assert client.call("status")["jobs"]["done"] == 2
    client.close()
    worker.pipe.send(StopChild(0))
    assert worker.process.wait(10) == 0
    arena.close()


def test_a_hung_copy_does_not_keep_the_process_from_stopping(start: type[WorkerProcess]):
    formats = object_formats(derive_layout(load_model_config(resolve_model(str(model_dir()))), 16, "float32"))
    arena = HostArena.create(arena_shape(formats, 1 << 20))
    worker = start(arena=arena, enable_cpu_cache=True, fault_inject="host.copy_in:hang")
    worker.wait_for(ChildReady)
    worker.jobs.send(LoadPages(JobId(EPOCH, 1), "full", [1], [1], [0], 0, 2))
    worker.plans.send(StepPlan(EPOCH, 0))
    assert isinstance(worker.answers(worker.router, 1)[0], StepResult), "steps go on"
    worker.jobs.send(Resync(2))
    assert worker.answers(worker.cache, 1) == [SlotsInUse(2, 0, [JobId(EPOCH, 1)], [1])]
    worker.pipe.send(StopChild(0))
    assert worker.process.wait(10) == 0
    arena.close()


def test_a_plan_that_does_not_fit_ends_the_process(start: type[WorkerProcess]):
    worker = start()
    worker.wait_for(ChildReady)
    worker.plans.send(StepPlan(EPOCH, 0, leaves=[3]))
    assert worker.process.wait(10) == 1
    assert worker.process.stdout is not None
    assert "PlanError: row 3 is not in the batch" in worker.process.stdout.read()


def test_too_small_a_pool_is_one_line(start: type[WorkerProcess]):
    worker = start(max_total_token_num=64, max_req_total_len=128)
    failed = worker.wait_for(ChildFailed)
    assert isinstance(failed, ChildFailed)
    assert "--max_total_token_num 64" in failed.reason
    assert worker.process.wait(10) == 1
