"""Timing operations leaves their results alone, and nothing behind."""

import torch

from kernels.cpu.backend import CpuBackend
from kernels.interface import KernelBackend
from kernels.profiling import OPERATIONS, KernelTimer
from kernels.reference import ReferenceBackend

CPU = torch.device("cpu")


def test_operations_are_all_that_a_backend_computes() -> None:
    own = {name for name, value in vars(KernelBackend).items() if callable(value) and not name.startswith("_")}
    assert set(OPERATIONS) == own - {"allocate", "check_model", "warmup"}


def test_calls_are_counted_and_timed_while_it_runs() -> None:
    backend = CpuBackend(num_threads=1)
    timer = KernelTimer(backend, CPU)
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    expected = backend.linear(x, weight)
    timer.start()
    assert torch.equal(backend.linear(x, weight), expected)
    backend.linear(x, weight=weight)
    backend.rms_norm(x, torch.ones(64), eps=1e-6)
    totals = timer.take()
    assert {name: calls for name, (calls, _) in totals.items()} == {"linear": 2, "rms_norm": 1}
    assert all(0 < seconds < 1 for _, seconds in totals.values())
    assert timer.take() == {}
    timer.stop()


def test_what_an_operation_calls_itself_is_not_counted_twice() -> None:
    backend = ReferenceBackend()  # its logits are a norm_linear, which is a rms_norm and a linear
    timer = KernelTimer(backend, CPU)
    timer.start()
    backend.logits(torch.randn(1, 8), torch.ones(8), 1e-6, torch.randn(16, 8))
    assert list(timer.take()) == ["logits"]
    timer.stop()


def test_a_stopped_timer_leaves_the_backend_as_it_was() -> None:
    backend = ReferenceBackend()
    before = dict(vars(backend))
    timer = KernelTimer(backend, CPU)
    timer.start()
    assert vars(backend) != before
    timer.stop()
    timer.stop()
    assert vars(backend) == before
