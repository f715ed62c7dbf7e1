"""Which backend a device gets."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.dispatch import get_backend
from kernels.reference import ReferenceBackend


def test_cpu_gets_its_own_backend() -> None:
    backend = get_backend(torch.device("cpu"), num_threads=1)
    assert isinstance(backend, CpuBackend)
    assert backend.num_threads == 1


def test_reference_runs_anywhere() -> None:
    assert isinstance(get_backend(torch.device("mps"), reference=True), ReferenceBackend)


def test_other_devices_are_refused_clearly() -> None:
    with pytest.raises(NotImplementedError, match="'mps'"):
        get_backend(torch.device("mps"))
