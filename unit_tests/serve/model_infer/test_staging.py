"""Pages go out and come back byte by byte, each job has one answer, and nothing wrong is ever DONE."""

from collections.abc import Iterator

import pytest
import torch

from serve.types import JobResult
from unit_tests.serve.model_infer.staging_bench import Bench, make_layout


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_what_was_stored_comes_back(bench: Bench):
    rank = bench.rank()
    bench.assign(*range(32))
    pages, slots = [3, 4, 5, 9, 0], [7, 8, 9, 2, 30]
    assert rank.store(pages, slots) is JobResult.DONE
    assert rank.load([20, 21, 22, 10, 15], slots) is JobResult.DONE
    assert torch.equal(rank.pool[[20, 21, 22, 10, 15]], rank.pool[pages])
