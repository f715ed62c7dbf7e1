"""Answers reach both readers, and a cache manager that does not read ends nothing."""

from pathlib import Path

import pytest

from serve.ipc.channel import ChannelFullError, Inbox, Outbox
from serve.ipc.messages import JobAnswer, LoadPages, Message, Resync, SlotsInUse
from serve.model_infer.job_answers import JobAnswerer, RefusedJobs
from serve.types import JobId, JobResult

JOB = JobId(1, 7)


class FullOutbox:
    def send(self, message: Message) -> None:
        raise ChannelFullError("mailbox does not read")


def test_both_get_the_answer(run_dir: Path):
    inboxes = [Inbox(run_dir, name) for name in ("router", "cache")]
    outboxes = [Outbox(run_dir, name) for name in ("router", "cache")]
    answerer = JobAnswerer(3, *outboxes)
    answerer.answer(JOB, JobResult.FAILED, "why", [4])
    for inbox in inboxes:
        assert inbox.receive(10) == [JobAnswer(JOB, 3, JobResult.FAILED, "why", [4])]
    answerer.tell_slots(9, [JOB], [1, 2])
    assert inboxes[1].receive(10) == [SlotsInUse(9, 3, [JOB], [1, 2])]
    for box in (*inboxes, *outboxes):
        box.close()


def test_only_the_router_must_read(run_dir: Path):
    router = Outbox(run_dir, "router")
    JobAnswerer(0, router, FullOutbox()).answer(JOB, JobResult.DONE)  # type: ignore[arg-type]
    with pytest.raises(ChannelFullError):
        JobAnswerer(0, FullOutbox(), router).answer(JOB, JobResult.DONE)  # type: ignore[arg-type]
    router.close()


def test_without_a_host_tier_every_job_is_refused(run_dir: Path):
    cache, inbox = Outbox(run_dir, "cache"), Inbox(run_dir, "cache")
    jobs = RefusedJobs(JobAnswerer(0, cache, cache))
    jobs.submit(LoadPages(JOB, "full", [1], [1], [1], 0, 1))
    jobs.resync(Resync(2))
    refusal = JobAnswer(JOB, 0, JobResult.FAILED, "no host tier")
    messages: list[Message] = []
    while len(messages) < 3:
        messages += inbox.receive(10)
    assert messages == [refusal, refusal, SlotsInUse(2, 0, [], [])]
    assert jobs.fileno() is None
    cache.close()
    inbox.close()
