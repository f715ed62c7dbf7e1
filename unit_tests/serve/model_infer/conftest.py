from collections.abc import Iterator

import pytest
import torch

from unit_tests.serve.model_infer.staging_bench import Bench


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Ranks with a pool each, and an arena whose 32 slots have names."""
    bench = Bench()
    bench.assign(*range(32))
    yield bench
    bench.close()
