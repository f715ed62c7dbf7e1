"""Measures what the machine can do: memory read bandwidth and the peak of a large matrix product."""

import time
from collections.abc import Callable

import torch

from serve.bench.cells import HardwareLimits

# Large against any cache, small against any memory.
_CPU_READ_BYTES = 512 << 20
_CUDA_COPY_BYTES = 4 << 30
_CPU_MATMUL_SIZE = 2048
_CUDA_MATMUL_SIZE = 8192


def measure_limits(device: torch.device, dtype: torch.dtype, repeat: int = 5) -> HardwareLimits:
    """The best of `repeat` runs of each, on as many threads as torch uses."""
    bandwidth = _cuda_bandwidth(device, repeat) if device.type == "cuda" else _cpu_bandwidth(repeat)
    return HardwareLimits(bandwidth, _matmul_peak(device, dtype, repeat))


def best_seconds(work: Callable[[], object], device: torch.device, repeat: int) -> float:
    """The shortest of `repeat` runs after one that is not counted; device work is waited for."""
    best = float("inf")
    for number in range(repeat + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            best = min(best, time.perf_counter() - begin)
    return best


def _cpu_bandwidth(repeat: int) -> float:
    """Bytes a second of a sum over memory; it writes nothing."""
    data = torch.ones(_CPU_READ_BYTES // 4, dtype=torch.float32)
    return data.nbytes / best_seconds(data.sum, data.device, repeat)


def _cuda_bandwidth(device: torch.device, repeat: int) -> float:
    """Bytes a second of a copy, what it reads and what it writes."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(_CUDA_COPY_BYTES, free // 4), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device, repeat)


def _matmul_peak(device: torch.device, dtype: torch.dtype, repeat: int) -> float:
    """FLOPs a second of a square product of random matrices (zeros would run faster than data does)."""
    size = _CUDA_MATMUL_SIZE if device.type == "cuda" else _CPU_MATMUL_SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / best_seconds(lambda: a @ b, device, repeat)
