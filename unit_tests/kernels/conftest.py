"""Fixtures of the kernel tests: a seeded generator, and every backend that this CPU can run."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from unit_tests.kernels.builders import AVAILABLE, cpu_backend, seed_by

COMBINATIONS = [(instruction_set, threads) for instruction_set in AVAILABLE for threads in (1, 2)]


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return seed_by(request)


@pytest.fixture(params=COMBINATIONS, ids=lambda pair: f"{pair[0].value}-{pair[1]}thread")
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return cpu_backend(*request.param)
