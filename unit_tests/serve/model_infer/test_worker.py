"""The loop of a worker, with a runner and jobs that only take notes."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from serve.ipc.channel import Outbox
from serve.ipc.messages import ChildReady, LoadPages, Message, StepPlan, StepResult, StopChild, StorePages
from serve.model_infer.worker import Worker
from serve.types import JobId

EPOCH = 1
LAST_STEP = 3


class Notes:
    """Runner, page jobs and the launcher's line in one. During step 0 two jobs come, behind the plans that wait."""

    def __init__(self, run_dir: Path) -> None:
        self.seen: list[str] = []
        self.num_steps = 0
        self.num_tokens = 0
        self._plans = Outbox(run_dir, f"worker-0.{EPOCH}")
        self._reader, self._writer = os.pipe()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._plans.send(message)

    def run(self, plan: StepPlan) -> StepResult:
        self.seen.append(f"plan {plan.step}")
        if plan.step == 0:
            self.send(LoadPages(JobId(EPOCH, 1), "full", [1], [1], [1], 0, 2))
            self.send(StorePages(JobId(EPOCH, 2), "full", [2], [2], [2], after_step=1))
            time.sleep(0.2)  # they are there when the step ends
        return StepResult(plan.epoch, plan.step, 0, 0.0)

    def submit(self, message: LoadPages | StorePages) -> None:
        self.seen.append(type(message).__name__)

    cancel = resync = submit

    def complete_step(self, step: int) -> None:
        self.seen.append(f"after {step}")

    def poll_finished(self) -> None:
        pass

    def jobs_fileno(self) -> None:
        return None

    def receive(self) -> list[Message]:
        return [StopChild(0)] if f"after {LAST_STEP}" in self.seen else []

    def close(self) -> None:
        self._plans.close()
        os.close(self._reader)
        os.close(self._writer)


def test_page_jobs_overtake_the_plans_that_wait(run_dir: Path):
    notes = Notes(run_dir)
    parent = SimpleNamespace(fileno=lambda: notes._reader, receive=notes.receive, send=lambda message: None)
    context: Any = SimpleNamespace(run_dir=run_dir, index=0, epoch=EPOCH, parent=parent)
    jobs = SimpleNamespace(
        submit=notes.submit,
        cancel=notes.cancel,
        resync=notes.resync,
        complete_step=notes.complete_step,
        poll_finished=notes.poll_finished,
        fileno=notes.jobs_fileno,
        close=lambda: None,
    )
    worker = Worker(context, notes, {}, lambda answerer: jobs)  # type: ignore[arg-type, return-value]
    notes.send(*(StepPlan(EPOCH, step) for step in range(LAST_STEP + 1)))
    worker.run(ChildReady("worker", 0, {}))
    assert notes.seen[:2] == ["plan 0", "after 0"]
    first_steps = notes.seen[: notes.seen.index("plan 2")]
    assert first_steps[2:4] == ["LoadPages", "StorePages"], notes.seen
    assert [entry for entry in notes.seen if entry.startswith("plan")] == [f"plan {n}" for n in range(LAST_STEP + 1)]
    worker.close()
    notes.close()
