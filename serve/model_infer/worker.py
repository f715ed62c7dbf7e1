"""The loop of a worker: plans in, results out."""

import logging
from collections import deque
from collections.abc import Callable

from serve.ipc.channel import Inbox, Outbox
from serve.ipc.child import ChildContext
from serve.ipc.control import ControlServer
from serve.ipc.messages import ChildReady, Message, StepPlan, StopChild
from serve.model_infer.errors import PlanError
from serve.model_infer.job_answers import JobAnswerer, PageJobs, RefusedJobs
from serve.model_infer.job_thread import JobThread
from serve.model_infer.memory_info import resident_bytes
from serve.model_infer.model_runner import ModelRunner, RunningStep
from serve.model_infer.step_watch import StepWatch

logger = logging.getLogger(__name__)


class Worker:
    """One rank's mailbox around a `ModelRunner`. Everything but page jobs runs on the thread that made it.

    On a device a plan is launched while the one before it runs: its result is sent once the next plan is launched, or,
    if none comes, when it ends (`StepWatch`). Page jobs have a mailbox and a thread of their own. Any exception leaves
    the loop; the process ends, and the launcher restarts the engine group.
    """

    def __init__(
        self,
        context: ChildContext,
        runner: ModelRunner,
        memory: dict[str, object],
        make_jobs: Callable[[JobAnswerer], PageJobs] = RefusedJobs,
    ) -> None:
        self._context = context
        self._runner = runner
        self._memory = memory
        self._is_stopping = False
        self._running: deque[RunningStep] = deque()
        self._watch = StepWatch()
        self._inbox = Inbox(context.run_dir, f"worker-{context.index}.{context.epoch}")
        self._router = Outbox(context.run_dir, f"router.{context.epoch}")
        self._jobs = JobThread(context.run_dir, context.index, context.epoch, make_jobs)
        self._control = ControlServer(
            context.run_dir,
            f"control-worker-{context.index}",
            {
                "status": self._status,
                "memory": self._memory_now,
                "check": self._check,
                "inject": self._jobs.inject,
                "profile_start": runner.start_profile,
                "profile_stop": runner.stop_profile,
            },
        )

    def run(self, ready: ChildReady) -> None:
        """Tell the launcher that all is ready, then serve until StopChild. Raises what a step raises."""
        parent = self._context.parent
        self._inbox.add_wakeup(parent.fileno())
        self._inbox.add_wakeup(self._control.fileno())
        self._inbox.add_wakeup(self._jobs.failure.fileno())
        self._inbox.add_wakeup(self._watch.fileno())
        parent.send(ready)
        while not self._is_stopping:
            messages = self._inbox.receive(None)
            self._watch.clear()
            for message in messages:
                self._handle(message)
            self._send_finished()
            self._jobs.check()
            self._control.run_pending()
            self._is_stopping = any(isinstance(message, StopChild) for message in parent.receive())
        logger.info("stopped after %d steps", self._runner.num_steps)

    def close(self) -> None:
        """End the copies and give the sockets back."""
        self._jobs.close()
        self._watch.close()
        self._control.close()
        for mailbox in (self._inbox, self._router):
            mailbox.close()

    def _handle(self, message: Message) -> None:
        if not isinstance(message, StepPlan):
            raise PlanError(f"a worker has no use for {type(message).__name__}")
        step = self._runner.launch(message)
        while self._running:  # they have ended, or end while this one runs
            self._send_result()
        self._running.append(step)
        self._send_finished()
        if self._running:
            self._watch.submit(step.end)
        self._jobs.complete_step(message.step)

    def _send_finished(self) -> None:
        while self._running and self._running[0].is_done():
            self._send_result()

    def _send_result(self) -> None:
        self._router.send(self._runner.complete(self._running.popleft()))

    def _status(self) -> dict[str, object]:
        runner = self._runner
        return {
            "rank": self._context.index,
            "epoch": self._context.epoch,
            "num_rows": runner.batch.num_rows,
            "num_steps": runner.num_steps,
            "num_tokens": runner.num_tokens,
            "jobs": self._jobs.statistics(),
        }

    def _memory_now(self) -> dict[str, object]:
        return {**self._memory, "resident": resident_bytes()}

    def _check(self) -> list[str]:
        return self._runner.batch.check_integrity()
