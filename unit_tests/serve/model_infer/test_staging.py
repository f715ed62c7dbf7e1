"""Each job has one answer, in order with steps, cancels and restarts of the cache manager."""

import threading
import time

import pytest
import torch

from serve.ipc.messages import CancelJob, LoadPages, Resync, StorePages
from serve.multi_level_cache.host_arena import ArenaHeaders
from serve.types import JobId, JobResult
from unit_tests.serve.helpers import falls_idle
from unit_tests.serve.model_infer.staging_bench import EPOCH, Bench, Rank

DONE, FAILED, DROPPED, CANCELLED = JobResult.DONE, JobResult.FAILED, JobResult.DROPPED, JobResult.CANCELLED


def wait_until_running(rank: Rank, site: str) -> None:
    """A copy stands in an injected hang."""
    deadline = time.monotonic() + 10
    while not rank.injector.counts[f"{site}:hang"]:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("is_sync", [False, True])
def test_what_was_stored_comes_back(bench: Bench, is_sync: bool):
    rank = bench.rank(is_sync=is_sync)
    pages, slots = [3, 4, 5, 9, 0], [7, 8, 9, 2, 30]
    assert rank.store(pages, slots) is DONE
    assert rank.load([20, 21, 22, 10, 15], slots) is DONE
    assert torch.equal(rank.pool[[20, 21, 22, 10, 15]], rank.pool[pages])
    statistics = rank.engine.statistics()
    assert (statistics["done"], statistics["unanswered"], statistics["waiting_store_bytes"]) == (2, 0, 0)
    assert statistics["store_bytes"] == statistics["load_bytes"] == 5 * rank.pool.shape[1]


def test_a_store_waits_for_its_step(bench: Bench):
    rank = bench.rank()
    rank.engine.complete_step(6)
    job = rank.send_store([1], [1], after_step=8)
    rank.engine.complete_step(7)
    time.sleep(0.05)
    rank.engine.poll_finished()
    assert rank.answerer.answers == []
    assert not bench.arena.payload[1].any()
    rank.pool[1] = 9  # what step 8 computes
    rank.engine.complete_step(8)
    assert rank.result(job) is DONE
    assert (bench.arena.payload[1, : rank.pool.shape[1]] == 9).all()


def test_a_store_of_a_step_that_has_run_starts_at_once(bench: Bench):
    rank = bench.rank()
    rank.engine.complete_step(5)
    assert rank.store([1], [1], after_step=5) is DONE


def test_a_store_that_waits_for_its_step_can_be_cancelled(bench: Bench):
    rank = bench.rank()
    job = rank.send_store([1], [1], after_step=3)
    rank.cancel(job)
    rank.engine.complete_step(3)
    assert rank.result(job) is CANCELLED
    assert not bench.arena.payload.any()


def test_queued_jobs_are_cancelled_at_once_and_running_ones_after_their_batch(bench: Bench):
    rank = bench.rank(faults="host.copy_out:hang:n=1")
    for mover in rank.parts.movers.values():
        mover.engine.batch_bytes = 1
    running, queued = rank.send_store([1, 2, 3], [1, 2, 3]), rank.send_store([4], [4])
    wait_until_running(rank, "host.copy_out")
    rank.cancel(queued)
    assert rank.answer_of(queued)[0] is CANCELLED
    rank.cancel(running)
    assert len(rank.answerer.answers) == 1, "its bytes are in use"
    rank.injector.release()  # type: ignore[union-attr]
    assert rank.result(running) is CANCELLED
    assert not bench.arena.payload[2:5].any(), "what comes after the batch at hand is not written"


def test_cancelling_what_has_ended_or_was_never_there_changes_nothing(bench: Bench):
    rank = bench.rank()
    job = rank.send_store([1], [1])
    assert rank.result(job) is DONE
    rank.cancel(job)
    rank.engine.cancel(CancelJob(JobId(EPOCH, 99)))
    assert len(rank.answerer.answers) == 1


def test_a_job_that_comes_twice_is_answered_once(bench: Bench):
    rank = bench.rank()
    generations = bench.arena.generation[[1]].tolist()
    message = StorePages(JobId(EPOCH, 5), "full", [1], [1], generations, -1)
    rank.engine.submit(message)
    rank.engine.submit(message)
    rank.wait_answers(message.job)
    rank.engine.submit(message)
    time.sleep(0.02)
    rank.engine.poll_finished()
    assert len(rank.answerer.answers) == 1


def test_stores_beyond_the_queue_are_dropped_and_loads_are_not(bench: Bench):
    rank = bench.rank(max_waiting_bytes=3 * bench.layout.groups[0].bytes_per_page)
    first = rank.send_store([1, 2, 3, 4], [1, 2, 3, 4], after_step=0)  # the first one may be of any size
    second = rank.send_store([5], [5], after_step=0)
    assert rank.answer_of(second)[:2] == (DROPPED, "too many stores are waiting")
    rank.engine.complete_step(0)
    assert rank.result(first) is DONE
    assert rank.store([5], [5]) is DONE
    assert rank.load([6], [5]) is DONE


@pytest.mark.parametrize("site", ["host.copy_out", "host.copy_in"])
def test_an_exception_on_a_stream_is_an_answer_and_the_next_job_runs(bench: Bench, site: str):
    rank = bench.rank(faults=f"{site}:fail:n=1")
    jobs = [rank.send_store([1], [1]), rank.send_store([2], [2])]
    rank.wait_answers(*jobs)
    jobs += [rank.send_load([4], [2]), rank.send_load([5], [2])]
    failed = jobs[0] if site == "host.copy_out" else jobs[2]
    result, detail, bad_slots = rank.answer_of(failed)
    assert (result, bad_slots) == (FAILED, [])
    assert detail.startswith("InjectedFaultError: ")
    assert detail.endswith(f"injected at {site}")
    assert all(rank.result(job) is DONE for job in jobs if job is not failed)


@pytest.mark.parametrize(
    ("group", "pages", "slots", "generations", "layers"),
    [
        ("other", [1], [1], [1], (0, 9)),
        ("full", [1], [1, 2], [1, 1], (0, 9)),
        ("full", [1], [1], [], (0, 9)),
        ("full", [32], [1], [1], (0, 9)),
        ("full", [-1], [1], [1], (0, 9)),
        ("full", [1], [32], [1], (0, 9)),
        ("full", [1], [1], [1], (1, 9)),
        ("full", [1], [1], [1], (0, 1)),
    ],
)
def test_a_job_that_makes_no_sense_fails(
    bench: Bench, group: str, pages: list[int], slots: list[int], generations: list[int], layers: tuple[int, int]
):
    rank = bench.rank()
    before = rank.pool.clone()
    rank.engine.submit(LoadPages(JobId(EPOCH, 1), group, pages, slots, generations, *layers))
    ((_, result, detail, _),) = rank.answerer.answers
    assert result is FAILED
    assert detail
    assert torch.equal(rank.pool, before)


def test_a_restarted_manager_hears_what_is_in_use_and_old_claims_are_refused(bench: Bench):
    rank = bench.rank(faults="host.copy_in:hang")
    load = rank.send_load([1, 2], [4, 9])
    held = rank.send_store([3], [7], after_step=0)
    assert rank.store([6], [6]) is DONE
    old = bench.arena.generation[[11]].tolist()
    num_starts = bench.arena.begin_management()
    rank.engine.resync(Resync(num_starts))
    assert rank.answerer.told == [(num_starts, [load, held], [4, 7, 9])]
    late = rank.send_store([4], [11], old)
    assert rank.answer_of(late)[:2] == (FAILED, "claimed from an earlier cache manager")
    assert not bench.arena.payload[11].any()
    ArenaHeaders(bench.arena, num_starts).assign([11], bytes(32))
    assert rank.store([4], [11]) is DONE
    rank.injector.release()  # type: ignore[union-attr]
    rank.engine.complete_step(0)
    rank.wait_answers(load, held)
    rank.engine.resync(Resync(num_starts))
    assert rank.answerer.told[-1] == (num_starts, [], [])


def test_a_hung_copy_does_not_keep_a_worker_from_stopping(bench: Bench):
    rank = bench.rank(faults="host.copy_in:hang,host.copy_out:delay=3600")
    rank.send_load([1], [1])
    rank.send_store([1], [1])
    wait_until_running(rank, "host.copy_in")
    begun = time.monotonic()
    rank.engine.close()
    assert time.monotonic() - begun < 60
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging-")]
    bench.ranks.clear()


def test_threads_sleep_while_there_is_nothing_to_do(bench: Bench):
    rank = bench.rank()
    rank.store([1], [1])
    assert falls_idle(time.process_time, most_s=0.02)


def test_the_end_of_a_job_wakes_the_mailbox(bench: Bench):
    import select

    rank = bench.rank()
    assert not select.select([rank.engine.fileno()], [], [], 0)[0]
    rank.send_store([1], [1])
    assert select.select([rank.engine.fileno()], [], [], 10)[0]
    rank.engine.poll_finished()
    assert len(rank.answerer.answers) == 1
    assert not select.select([rank.engine.fileno()], [], [], 0)[0]
