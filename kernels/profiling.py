"""Times of a backend's operations, one by one."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from kernels.interface import KernelBackend

OPERATIONS = (
    "embedding",
    "linear",
    "linear_residual",
    "rms_norm",
    "norm_linear",
    "logits",
    "norm_gate_up",
    "silu_and_mul",
    "rope_and_store",
    "paged_attention",
    "moe_mlp",
)


class KernelTimer:
    """Between `start` and `stop` every operation of a backend is timed.

    Timed stand-ins are attributes of the backend object that hide its class's methods; they are removed by `stop`, so
    that an operation costs nothing more while no profile runs. Of operations that call others the outermost counts. On
    CUDA times are the device's, between events; elsewhere they are the calling thread's. For the backend's thread.
    """

    def __init__(self, backend: KernelBackend, device: torch.device) -> None:
        self._backend = backend
        self._is_cuda = device.type == "cuda"
        self._is_inside = False
        self._totals: dict[str, tuple[int, float]] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Time from now on."""
        for name in OPERATIONS:
            setattr(self._backend, name, self._timed(name, getattr(self._backend, name)))

    def stop(self) -> None:
        """Time no longer."""
        for name in OPERATIONS:
            vars(self._backend).pop(name, None)

    def take(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds by operation since the last `take`. On CUDA this waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            for name, begun, ended in self._events:
                self._add(name, begun.elapsed_time(ended) * 1e-3)
            self._events.clear()
        totals, self._totals = self._totals, {}
        return totals

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        run = self._between_events if self._is_cuda else self._by_clock

        @wraps(operation)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:
                return operation(*arguments, **options)
            self._is_inside = True
            try:
                return run(name, lambda: operation(*arguments, **options))
            finally:
                self._is_inside = False

        return timed

    def _by_clock(self, name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = call()
        self._add(name, time.perf_counter() - begun)
        return result

    def _between_events(self, name: str, call: Callable[[], Any]) -> Any:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        result = call()
        ended.record()
        self._events.append((name, begun, ended))
        return result

    def _add(self, name: str, seconds: float) -> None:
        calls, total = self._totals.get(name, (0, 0.0))
        self._totals[name] = (calls + 1, total + seconds)
