"""A step's few bytes on their way to the device and back."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

# Larger tensors go through the copy engines.
_MAX_KERNEL_BYTES = 256 << 10
# Copies that may be under way: a step makes some ten, and two steps are launched at most.
_MAX_COPIES = 1024


class _Uploads:
    """Page-locked memory of the last copies to a device."""

    def __init__(self) -> None:
        self._held: deque[torch.Tensor] = deque(maxlen=_MAX_COPIES)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        from kernels.triton_kernels.host_copy import host_copy

        source = tensor.contiguous().pin_memory()
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        host_copy(source, target)
        self._held.append(source)
        return target


@lru_cache
def _uploads(device: torch.device) -> _Uploads:
    return _Uploads()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, in stream order and without waiting, also while pages move.

    From pageable memory the driver would first wait for all that has been launched.
    """
    if device.type != "cuda":
        return tensor.to(device)
    if tensor.nbytes <= _MAX_KERNEL_BYTES:
        return _uploads(device).send(tensor, device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Readback:
    """Copies of tensors, and with them the end of all that was launched before. On the CPU all is there at once."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Starts the copies, of small tensors. No tensors: only the end is asked for."""
        self._event: Any = None
        self._host = list(tensors)
        if device.type == "cuda":
            from kernels.triton_kernels.host_copy import host_copy

            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._host, tensors, strict=True):
                host_copy(source.contiguous(), target)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[torch.Tensor]:
        """The copies. Raises RuntimeError for what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
