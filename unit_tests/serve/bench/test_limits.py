import time

import pytest
import torch

from serve.bench import limits
from serve.bench.limits import best_seconds, measure_limits

CPU = torch.device("cpu")


def test_the_best_run_counts_and_the_first_does_not() -> None:
    naps = iter([0.0, 0.05, 0.02, 0.05])
    assert 0.02 <= best_seconds(lambda: time.sleep(next(naps)), CPU, 3) < 0.05


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
