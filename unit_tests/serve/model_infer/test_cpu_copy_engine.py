"""Copies beside steps on a CPU: a load takes about its memcpy time, whatever the computing thread does."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from serve.ipc.messages import CancelJob
from serve.types import JobResult
from unit_tests.serve.model_infer.staging_bench import Bench, make_layout

NUM_PAGES = 256
MAX_STEPS = 200  # the copy itself needs the interpreter two or three times; once a page would be hundreds of steps
STEP_US = 2000


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(num_slots=2 * NUM_PAGES)
    bench.assign(*range(2 * NUM_PAGES))
    yield bench
    bench.close()


def step() -> None:
    """As kernels of a decode step: two milliseconds of native code that keeps the interpreter to itself."""
    ctypes.PyDLL(None).usleep(STEP_US)


def test_few_steps_pass_while_many_scattered_pages_are_loaded(bench: Bench):
    rank = bench.rank(num_pages=4 * NUM_PAGES)
    pages, slots = list(range(0, 2 * NUM_PAGES, 2)), list(range(0, 2 * NUM_PAGES, 2))
    assert rank.store(pages, slots) is JobResult.DONE
    targets = [page + 2 * NUM_PAGES for page in pages]
    job, num_steps = rank.send_load(targets, slots), 0
    while not rank.has_answered(job):
        step()
        num_steps += 1
        rank.engine.poll_finished()
        assert num_steps <= MAX_STEPS
    assert rank.result(job) is JobResult.DONE
    assert torch.equal(rank.pool[targets], rank.pool[pages])


def test_a_load_that_is_cancelled_stops_between_pages(bench: Bench):
    """All its pages are one batch, which is stopped before its first page here."""
    rank = bench.rank(num_pages=4 * NUM_PAGES, faults="host.copy_in:hang:n=1")
    slots = list(range(NUM_PAGES))
    assert rank.store(slots, slots) is JobResult.DONE
    before = rank.pool.clone()
    job = rank.send_load([page + NUM_PAGES for page in slots], slots)
    while not rank.injector.counts["host.copy_in:hang"]:  # type: ignore[union-attr]
        step()
    rank.engine.cancel(CancelJob(job))
    rank.injector.release()  # type: ignore[union-attr]
    assert rank.answer_of(job) == (JobResult.CANCELLED, "", [])
    assert torch.equal(rank.pool, before)


def test_units_that_are_not_whole_words_are_refused():
    bench = Bench(make_layout(page_size=1, num_layers=1, head_dim=1))  # 8 bytes a unit: the least
    rank = bench.rank(num_pages=2)
    bench.assign(0)
    assert rank.store([0], [0]) is JobResult.DONE
    bench.close()
