"""The router as a real child process: mailboxes, control plane, launcher's pipe."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.channel import Inbox, Outbox
from serve.ipc.control import ControlClient
from serve.ipc.messages import (
    ChildReady,
    ChildStart,
    EngineUp,
    Message,
    OutputBatch,
    RequestOutput,
    SlotReleased,
    StepPlan,
    StopChild,
    SubmitRequest,
)
from serve.ipc.pipe import MessagePipe
from serve.ipc.request_table import RequestTable, TableShape
from serve.types import FinishReason, SamplingParams
from unit_tests.serve.helpers import falls_idle
from unit_tests.serve.router.router_fakes import EPOCH, HASHER, PAGE, FakeWorker, expected_tokens, prompt_of

ROOT = Path(__file__).resolve().parents[3]
INFO = {"namespace": b"test".hex(), "key": (b"k" * 32).hex(), "num_pages": {"full": 30}}


def make_config(run_dir: Path, **serve) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="none", **serve),
        model_path=run_dir,
        model_name="none",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=400,
        batch_max_tokens=64,
        chunked_prefill_size=32,
        page_size=PAGE,
        num_slots=4,
    )


class RouterChild:
    """The process, and what its peers would be: launcher, one worker, one HTTP process."""

    def __init__(self, run_dir: Path, **serve) -> None:
        self.run_dir = run_dir
        self.table = RequestTable.create(TableShape(4, 400, PAGE))
        self.stale = self._fill(prompt_of(5), max_tokens=1)
        self.worker = FakeWorker(0, self.table, ("full",))
        self.worker_inbox = Inbox(run_dir, f"worker-0.{EPOCH}")
        self.server_inbox = Inbox(run_dir, "http-0")
        self.outbox = Outbox(run_dir, f"router.{EPOCH}")
        self.pipe, theirs = MessagePipe.pair(send_timeout_s=5)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "serve.ipc.child", "router", "0", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), self.table.fd],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        config = make_config(run_dir, **serve).model_dump_json().encode()
        model = {"config": {"eos_token_ids": [7]}}
        self.pipe.send(ChildStart(EPOCH, config, model, {"table": self.table.fd}))
        (self.ready,) = self.receive()

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while not messages:
            messages = self.pipe.receive()
        return messages

    def _fill(self, prompt: list[int], **sampling) -> tuple[int, int]:
        slot = next(slot for slot in range(4) if self.table.is_free(slot))
        root, tokens = HASHER.root(None, None), np.array(prompt, np.uint32)
        params = SamplingParams(**sampling)
        return slot, self.table.fill(slot, tokens, params, root, HASHER.chain(root, tokens))

    def submit(self, prompt: list[int], **sampling) -> tuple[int, int]:
        slot, generation = self._fill(prompt, **sampling)
        self.outbox.send(SubmitRequest(slot, generation, 0, "r"))
        return slot, generation

    def serve(self, deadline_s: float = 20.0) -> list[RequestOutput]:
        """Run plans until a slot is released; gives the outputs."""
        outputs: list[RequestOutput] = []
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            for message in self.worker_inbox.receive(0.002):
                assert isinstance(message, StepPlan)
                self.worker.plans.append(message)
                self.outbox.send(self.worker.run_next())
            for message in self.server_inbox.receive(0):
                if isinstance(message, SlotReleased):
                    return outputs
                assert isinstance(message, OutputBatch)
                outputs += message.outputs
        raise AssertionError("no slot was released")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.outbox.close()
        self.worker_inbox.close()
        self.server_inbox.close()


@pytest.fixture
def child(run_dir: Path) -> Iterator[RouterChild]:
    child = RouterChild(run_dir)
    yield child
    child.stop()


def test_a_request_runs_through_the_process(child: RouterChild):
    assert child.ready == ChildReady("router", 0, {})
    assert child.table.is_free(child.stale[0])  # nothing of an earlier epoch lives
    child.pipe.send(EngineUp(EPOCH, INFO))
    prompt = prompt_of(50)
    child.submit(prompt, max_tokens=12, ignore_eos=True)
    outputs = child.serve()
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == expected_tokens(prompt, SamplingParams(max_tokens=12, ignore_eos=True), 400)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_the_control_plane_answers_between_turns(child: RouterChild):
    control = ControlClient(child.run_dir, "control-router")
    assert control.call("status")["is_up"] is False
    child.pipe.send(EngineUp(EPOCH, INFO))
    child.submit(prompt_of(50), max_tokens=4)
    child.serve()
    assert control.call("statistics")["num_submitted"] == 1
    assert control.call("check") == {"problems": []}
    assert control.call("list") == []
    assert control.call("flush")["num_dropped"] > 0
    control.close()


def test_an_idle_router_uses_no_cpu(child: RouterChild):
    child.pipe.send(EngineUp(EPOCH, INFO))
    child.submit(prompt_of(20), max_tokens=2)
    child.serve()
    assert falls_idle(lambda: cpu_s(child.process.pid), most_s=0.01)


def cpu_s(pid: int) -> float:
    """User and system time of a process, in steps of a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_process_never_loads_torch(child: RouterChild):
    assert "torch" not in Path(f"/proc/{child.process.pid}/maps").read_text()


def test_a_stop_ends_what_runs_after_its_drain_and_exits_0(child: RouterChild):
    child.pipe.send(EngineUp(EPOCH, INFO))
    child.submit(prompt_of(20), max_tokens=300)
    while not child.worker_inbox.receive(1.0):
        pass
    child.pipe.send(StopChild(0.2))
    assert child.process.wait(10) == 0


def test_a_step_without_a_result_ends_the_process_with_a_logged_line(run_dir: Path):
    child = RouterChild(run_dir, step_timeout=0.3)
    try:
        child.pipe.send(EngineUp(EPOCH, INFO))
        child.submit(prompt_of(20), max_tokens=300)
        assert child.process.wait(10) == 1
        assert "a step has no result" in child.process.stdout.read()
    finally:
        child.stop()
