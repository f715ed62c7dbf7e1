"""Page jobs have a thread of their own: they wait for no step, unless it is the one that they follow."""

import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve.ipc.channel import Inbox, Outbox
from serve.ipc.child import ChildContext, StartError
from serve.ipc.messages import CancelJob, JobAnswer, LoadPages, Message, StepPlan, StorePages
from serve.model_infer import process, startup
from serve.model_infer.errors import PlanError
from serve.model_infer.job_answers import JobAnswerer, PageJobs
from serve.model_infer.job_thread import JobThread
from serve.model_infer.staging import StagingEngine
from serve.types import JobId, JobResult
from unit_tests.serve.model_infer.staging_bench import Bench

EPOCH = 1
LOAD, STORE = JobId(EPOCH, 1), JobId(EPOCH, 2)


class Ends:
    """Router's and cache manager's ends of a rank's page jobs; this thread is the one that computes."""

    def __init__(self, run_dir: Path, make_jobs: Callable[[JobAnswerer], PageJobs]) -> None:
        self.router, self.cache = Inbox(run_dir, f"router.{EPOCH}"), Inbox(run_dir, "cache")
        self.jobs = Outbox(run_dir, f"pages-0.{EPOCH}")
        self.thread = JobThread(run_dir, 0, EPOCH, make_jobs)

    def answer(self, inbox: Inbox) -> Message:
        (message,) = inbox.receive(10.0)
        return message

    def close(self) -> None:
        self.thread.close()
        for mailbox in (self.router, self.cache, self.jobs):
            mailbox.close()


@pytest.fixture
def ends(run_dir: Path, bench: Bench) -> Iterator[Ends]:
    parts = bench.rank().parts
    ends = Ends(run_dir, lambda answerer: StagingEngine(parts, answerer))
    yield ends
    ends.close()


def test_only_the_workers_process_has_its_threads_take_turns_faster(
    run_dir: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    before, seen = sys.getswitchinterval(), []
    parts = bench.rank().parts
    Ends(run_dir, lambda answerer: StagingEngine(parts, answerer)).close()
    assert sys.getswitchinterval() == before

    def start_worker(context: ChildContext) -> None:
        seen.append(sys.getswitchinterval())
        raise StartError("no model")

    monkeypatch.setattr(startup, "start_worker", start_worker)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # which `main` leaves as it is
    try:
        with pytest.raises(StartError):
            process.main(None)  # type: ignore[arg-type]
    finally:
        sys.setswitchinterval(before)
    assert seen == [pytest.approx(process.SWITCH_INTERVAL_S)]


def test_a_load_begins_and_ends_within_a_step(ends: Ends, bench: Bench):
    """The computing thread never calls anything of the thread between the message and the answers."""
    bench.ranks[0].store([1], [1])
    ends.jobs.send(LoadPages(LOAD, "full", [5], [1], bench.arena.generation[[1]].tolist(), 0, 9))
    done = JobAnswer(LOAD, 0, JobResult.DONE)
    assert [ends.answer(ends.router), ends.answer(ends.cache)] == [done, done]


def test_a_store_waits_for_its_step_and_for_nothing_else(ends: Ends, bench: Bench):
    ends.thread.complete_step(3)
    ends.jobs.send(StorePages(STORE, "full", [1], [1], bench.arena.generation[[1]].tolist(), after_step=4))
    assert ends.router.receive(0.1) == []
    ends.thread.complete_step(4)
    assert ends.answer(ends.router) == JobAnswer(STORE, 0, JobResult.DONE)
    late = JobId(EPOCH, 3)
    ends.jobs.send(StorePages(late, "full", [1], [2], bench.arena.generation[[2]].tolist(), after_step=4))
    assert ends.answer(ends.router) == JobAnswer(late, 0, JobResult.DONE)


def test_steps_do_not_wake_the_thread_while_nothing_waits_for_them(ends: Ends):
    begun = time.thread_time(), time.process_time()
    for step in range(10_000):
        ends.thread.complete_step(step)
    spent = time.thread_time() - begun[0], time.process_time() - begun[1]
    assert spent[1] - spent[0] < 0.1, "seconds of other threads"


def test_an_error_of_the_thread_is_the_computing_threads(ends: Ends):
    ends.jobs.send(CancelJob(LOAD))  # of nothing: ignored
    ends.jobs.send(StepPlan(EPOCH, 1))
    assert select.select([ends.thread.failure.fileno()], [], [], 10)[0]
    with pytest.raises(PlanError, match="no use for StepPlan"):
        ends.thread.check()
