"""Chooses the kernel backend of a device."""

import torch

from kernels.interface import KernelBackend


def get_backend(device: torch.device, *, reference: bool = False) -> KernelBackend:
    """The backend for tensors on `device`; `reference=True` gives the plain torch oracle instead."""
    if reference:
        from kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if device.type == "cpu":
        from kernels.cpu.backend import CpuBackend

        return CpuBackend()
    raise NotImplementedError(f"no kernels for device type {device.type!r}")
