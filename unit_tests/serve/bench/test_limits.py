from types import SimpleNamespace

import pytest
import torch

from serve.bench import limits
from serve.bench.limits import best_seconds, measure_limits

CPU = torch.device("cpu")


def test_the_best_run_counts_and_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = 0.0, iter([0.5, 5.0, 2.0, 5.0])

    def work() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: now))
    assert best_seconds(work, CPU, 3) == 2.0


def test_limits_of_this_machine_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_READ_BYTES", 16 << 20)
    monkeypatch.setattr(limits, "_CPU_MATMUL_SIZE", 256)
    got = measure_limits(CPU, torch.float32, repeat=2)
    assert 1e7 < got.read_bytes_per_s < 1e13
    assert 1e7 < got.flops_per_s < 1e14


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_limits_of_a_gpu_are_measured() -> None:
    got = measure_limits(torch.device("cuda"), torch.bfloat16, repeat=3)
    assert 1e11 < got.read_bytes_per_s < 1e14
    assert 1e12 < got.flops_per_s < 1e16
