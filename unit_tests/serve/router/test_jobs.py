"""Jobs hold their pages from `Begin` until the last rank has answered, whatever happens to who wanted them."""

import pytest

from serve.ipc.messages import Begin, CancelJob, JobAnswer, Message, StorePages
from serve.router.cache_client import CacheClient, ProbePolicy
from serve.router.jobs import JobBook
from serve.router.ledger import StateLedger
from serve.router.prefix_index import GroupSpec
from serve.types import JobId, JobResult


class Bench:
    """A book of two ranks over a ledger, with mailboxes that are lists."""

    def __init__(self) -> None:
        self.ledger = StateLedger((GroupSpec("full"),), {"full": 8}, 16)
        self.to_manager: list[Message] = []
        self.to_workers: list[Message] = []
        self.ends: list[tuple[JobId, JobResult, float]] = []
        self.is_full = False
        cache = CacheClient(self._send, ProbePolicy())
        self.book = JobBook(3, 2, self.ledger, cache, self.to_workers.append)

    def _send(self, message: Message) -> bool:
        if not self.is_full:
            self.to_manager.append(message)
        return not self.is_full

    def begin(self, pages: list[int], now: float = 10.0) -> StorePages:
        job = self.book.new_id()
        message = StorePages(job, "full", pages, pages, [0] * len(pages), 0)
        assert self.book.begin(message, lambda *end: self.ends.append(end), now) == (not self.is_full)
        return message

    def answer(self, message: StorePages, rank: int, result: JobResult = JobResult.DONE, now: float = 12.0) -> None:
        self.book.answer(JobAnswer(message.job, rank, result, ""), now)

    def num_used(self) -> int:
        assert self.ledger.check_integrity() == []
        return self.ledger.groups["full"].num_used


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def pages(bench: Bench) -> list[int]:
    """Named pages that nobody references."""
    group = bench.ledger.groups["full"]
    taken = group.take(2)
    for page in taken:
        group.index.add(bytes([page + 1]) * 32, page)
    group.unref(taken)
    return taken


def test_ids_of_an_epoch_differ(bench: Bench):
    ids = [bench.book.new_id() for _ in range(5)]
    assert len(set(ids)) == 5
    assert {job.epoch for job in ids} == {3}


def test_a_job_is_told_to_the_manager_first_and_holds_its_pages_until_all_ranks_have_answered(
    bench: Bench, pages: list[int]
):
    message = bench.begin(pages)
    assert bench.to_manager == [Begin(message.job)]
    assert bench.to_workers == [message]
    assert (len(bench.book), message.job in bench.book, bench.book.num_pages, bench.num_used()) == (1, True, 2, 2)
    bench.answer(message, 0)
    assert (bench.ends, bench.num_used()) == ([], 2)
    bench.answer(message, 0)  # twice is once
    assert bench.ends == []
    bench.answer(message, 1, now=12.5)
    assert bench.ends == [(message.job, JobResult.DONE, 2.5)]
    assert (len(bench.book), bench.num_used()) == (0, 0)
    bench.answer(message, 1)
    assert len(bench.ends) == 1


def test_one_rank_that_failed_makes_it_fail(bench: Bench, pages: list[int]):
    message = bench.begin(pages)
    bench.answer(message, 0, JobResult.FAILED)
    bench.answer(message, 1)
    assert [result for _, result, _ in bench.ends] == [JobResult.FAILED]


def test_a_manager_that_cannot_be_told_begins_nothing(bench: Bench, pages: list[int]):
    bench.is_full = True
    bench.begin(pages)
    assert (len(bench.book), bench.to_workers, bench.num_used()) == (0, [], 0)


def test_cancelling_asks_the_ranks_once_and_waits_for_their_answers(bench: Bench, pages: list[int]):
    message = bench.begin(pages)
    assert not bench.book.is_giving_back
    for _ in range(2):
        bench.book.cancel(message.job)
    assert bench.to_workers == [message, CancelJob(message.job)]
    assert bench.book.is_giving_back
    assert bench.num_used() == 2
    for rank in range(2):
        bench.answer(message, rank, JobResult.CANCELLED)
    assert not bench.book.is_giving_back
    assert [result for _, result, _ in bench.ends] == [JobResult.CANCELLED]
    bench.book.cancel(message.job)


def test_the_oldest_job_is_the_one_to_watch(bench: Bench, pages: list[int]):
    assert bench.book.oldest_sent_at() is None
    first, second = bench.begin(pages[:1], 10.0), bench.begin(pages[1:], 11.0)
    assert bench.book.oldest_sent_at() == 10.0
    for rank in range(2):
        bench.answer(first, rank)
    assert bench.book.oldest_sent_at() == 11.0
    for rank in range(2):
        bench.answer(second, rank)
    assert bench.book.oldest_sent_at() is None
