"""Leases end by deadline before Begin, by all ranks' answers after it, and never otherwise."""

import pytest

from serve.ipc.messages import LeaseLost
from serve.multi_level_cache.leases import (
    MAX_LAPSED,
    PHASE_MOVES,
    AnswerOutcome,
    BeginOutcome,
    LeaseKind,
    LeasePhase,
    LeaseTable,
)
from serve.multi_level_cache.page_state import IllegalMoveError
from serve.types import JobId, JobResult
from unit_tests.serve.multi_level_cache.builders import Bench, FakeClock, request

JOB = JobId(1, 1)


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(FakeClock())


def offer(table: LeaseTable, kind: LeaseKind = LeaseKind.STORE, ranks: int = 2) -> None:
    table.open(JOB, kind, [], ranks, 5.0, LeasePhase.OFFERED)


def test_moves_follow_the_table(table: LeaseTable):
    offer(table)
    lease = table.get(JOB)
    assert lease is not None
    for phase in LeasePhase:
        if phase not in PHASE_MOVES[LeasePhase.OFFERED]:
            with pytest.raises(IllegalMoveError):
                lease.move(phase)


def test_every_rank_answers_once(table: LeaseTable):
    offer(table)
    assert table.begin(JOB) is BeginOutcome.BEGUN
    assert table.begin(JOB) is BeginOutcome.DUPLICATE
    answers = [table.answer(JOB, rank, JobResult.DONE) for rank in (0, 0, 2, -1, 1, 1)]
    assert answers == [
        AnswerOutcome.COUNTED,
        AnswerOutcome.DUPLICATE,
        AnswerOutcome.UNKNOWN_RANK,
        AnswerOutcome.UNKNOWN_RANK,
        AnswerOutcome.LAST,
        AnswerOutcome.UNKNOWN_JOB,
    ]


def test_an_answer_that_overtakes_its_begin_begins_the_job(table: LeaseTable):
    offer(table)
    assert table.answer(JOB, 1, JobResult.DONE) is AnswerOutcome.COUNTED
    lease = table.get(JOB)
    assert lease is not None
    assert lease.phase is LeasePhase.BEGUN


def test_what_is_remembered_of_lapsed_claims_is_bounded(table: LeaseTable):
    for counter in range(MAX_LAPSED + 10):
        lease = table.open(JobId(1, counter), LeaseKind.STORE, [], 1, 5.0, LeasePhase.OFFERED)
        table.lapse(lease)
        if counter == 0:
            table.begin(JobId(1, 0))
    assert table.lapsed(JobId(1, 0)) is not None, "its job runs"
    assert table.lapsed(JobId(1, 1)) is None
    assert table.lapsed(JobId(1, MAX_LAPSED)) is not None


def test_a_claim_without_begin_ends_at_its_deadline():
    bench = Bench()
    prompt = request(0, "a", "b")
    bench.claim(prompt)
    bench.advance(9.9)
    assert bench.claim(prompt).num_present == 2, "FILLING pages are taken for claimers"
    bench.advance(0.2)
    bench.assert_idle()
    assert bench.host.stats.drops == {"claim_expired": 2}


def test_once_begun_no_deadline_ends_a_claim():
    bench = Bench()
    prompt = request(0, "a")
    reply = bench.claim(prompt, ranks=2)
    bench.begin(reply.job)
    bench.answer(reply.job, 0)
    bench.advance(1e6)
    assert bench.present(prompt) == [False], "FILLING pages are misses for readers"
    bench.answer(reply.job, 1)
    assert bench.present(prompt) == [True]


def test_a_job_that_begins_after_its_claim_lapsed_cannot_spoil_what_has_its_slots_now():
    bench = Bench(8)
    old, new = request("old", *range(6)), request("new", *range(6))
    late = bench.claim(old)
    bench.advance(11)
    bench.store(new)
    assert sum(bench.present(new)) == 6
    bench.begin(late.job)
    assert bench.one_reply() == LeaseLost(late.job)
    assert sum(bench.present(new)) == 0
    slots = {slot for _, _, slots, _ in late.granted for slot in slots}
    reply = bench.claim(request("other", *range(6)))
    assert not slots & {slot for _, _, mine, _ in reply.granted for slot in mine}
    bench.release(reply.job)
    bench.answer(late.job)
    bench.assert_idle()
    assert sum(bench.present(old)) == 0
    assert len(bench.claim(new).granted) == 6


def test_the_death_of_the_engine_ends_all_its_jobs():
    bench = Bench()
    stored, filling = request("stored", "a"), request("filling", "a")
    bench.store(stored)
    reply = bench.claim(filling)
    bench.begin(reply.job)
    bench.acquire(stored)
    bench.manager.engine_down(1)
    bench.assert_idle()
    assert (bench.present(stored), bench.present(filling)) == ([True], [False])
    bench.acquire_later(stored)
    assert bench.post.take() == [], "a message of the dead engine group lay in the mailbox"
    assert bench.acquire_later(stored, job=bench.job(epoch=2))
    assert len(bench.post.take()) == 1
