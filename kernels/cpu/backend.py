"""The CPU backend."""

import torch
import torch.nn.functional as F

from kernels.reference import ReferenceBackend


class CpuBackend(ReferenceBackend):
    """Kernels for float32 and bfloat16 models on the CPU."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads if num_threads is not None else torch.get_num_threads()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)
