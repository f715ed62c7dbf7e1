"""Where the time of steps goes: by phase, and within the forward pass by kernel."""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from kernels.interface import KernelBackend
from kernels.profiling import KernelTimer


class Phase(Enum):
    """Parts of a step, in their order. The end of each is marked."""

    WAIT = "wait"  # since the step before: its answer, mail, and whatever the router took longer than this worker
    PREPARE = "prepare"  # the plan's changes, and the tensors of the step
    FORWARD = "forward"
    SAMPLE = "sample"
    ANSWER = "answer"  # what remains


@dataclass
class _Total:
    """Sums over the steps of one kind."""

    num_steps: int = 0
    num_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)  # calls, seconds


class StepProfiler:
    """Records steps between `start` and `stop`. One thread, the runner's.

    A step is of kind "decode" when each row has one new token, else "prefill". The wait before a prefill step is not
    counted: mostly there was nothing to do. A device that works on its own is waited for at each mark.
    """

    def __init__(self, backend: KernelBackend, device: torch.device) -> None:
        self._timer = KernelTimer(backend, device)
        self._is_cuda = device.type == "cuda"
        self._totals: dict[str, _Total] = {}
        self._marks: dict[Phase, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """Forget what was recorded, and record."""
        self._totals = {}
        self._timer.stop()
        self._timer.take()
        self._timer.start()
        self._last = time.perf_counter()

    def stop(self) -> dict[str, Any]:
        """What was recorded, by kind of step: `steps`, `tokens`, `phases` (seconds), `kernels` ([calls, seconds])."""
        self._timer.stop()
        return {
            kind: {
                "steps": total.num_steps,
                "tokens": total.num_tokens,
                "phases": dict(total.phases),
                "kernels": {name: list(entry) for name, entry in total.kernels.items()},
            }
            for kind, total in self._totals.items()
        }

    def mark(self, phase: Phase) -> None:
        """The phase ends here."""
        if self._is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._marks[phase] = now - self._last
        self._last = now

    def end_step(self, num_tokens: int, is_decode: bool) -> None:
        """The step has been launched. num_tokens: new tokens of all rows, 0 for a plan without work."""
        self.mark(Phase.ANSWER)
        kernels = self._timer.take()
        marks, self._marks = self._marks, {}
        if not num_tokens:
            return
        total = self._totals.setdefault("decode" if is_decode else "prefill", _Total())
        total.num_steps += 1
        total.num_tokens += num_tokens
        if not is_decode:
            marks.pop(Phase.WAIT, None)
        for phase, seconds in marks.items():
            total.phases[phase.value] = total.phases.get(phase.value, 0.0) + seconds
        for name, (calls, seconds) in kernels.items():
            known = total.kernels.get(name, (0, 0.0))
            total.kernels[name] = (known[0] + calls, known[1] + seconds)
