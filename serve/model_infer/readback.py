"""Results on their way from the device to the host."""

from collections.abc import Sequence
from typing import Any

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, without waiting: the copy goes in stream order, from page-locked memory.

    From pageable memory the driver would first wait for all that has been launched.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Readback:
    """Copies of tensors, and with them the end of all that was launched before. On the CPU all is there at once."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Starts the copies. No tensors: only the end is asked for."""
        self._event: Any = None
        self._host = list(tensors)
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._host, tensors, strict=True):
                target.copy_(source, non_blocking=True)
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
