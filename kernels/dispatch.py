"""Chooses the kernel backend of a device."""

import torch

from kernels.interface import KernelBackend


def get_backend(device: torch.device, *, reference: bool = False, num_threads: int | None = None) -> KernelBackend:
    """The backend for tensors on `device`.

    `reference=True` gives the plain torch oracle instead, on any device. `num_threads` is for the CPU's backend
    (default: torch's number of threads). Raises NotImplementedError for a device that has no kernels.
    """
    if reference:
        from kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if device.type == "cpu":
        from kernels.cpu.backend import CpuBackend

        return CpuBackend(num_threads=num_threads)
    if device.type == "cuda":
        from kernels.cuda_backend import CudaBackend

        return CudaBackend()
    raise NotImplementedError(f"no kernels for device type {device.type!r}")
