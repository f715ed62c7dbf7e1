"""Copies by the GPU's copy engines on a stream of their own, straight between the pool and the page-locked arena."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from serve.model_infer.copy_engine import Batch, Bytes, CopyEngine, Fence, PartSums, page_part, slot_part
from serve.model_infer.host_pages import Piece
from serve.model_infer.page_runs import PageRun, page_runs

# The arena is page-locked in steps as jobs come to use it, since locking takes memory that may not be there yet.
_LOCK_STEP_BYTES = 256 << 20
# A step keeps the driver from everything else for some 10 ms: requests get their turn between two.
_FOLLOW_PAUSE_S = 0.03
_FOLLOW_S = 60.0

logger = logging.getLogger(__name__)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class LockedSlots:
    """Page-locks host slots (cudaHostRegister) step by step; any thread may call.

    A copy from or to a slot that could not be locked is right all the same, only slower. Steps end between slots: a
    copy must not cross from one registration into the next, and none crosses the end of a slot.
    """

    def __init__(self, host: Bytes) -> None:
        """host: uint8 [num_slots, slot_bytes], page-aligned, slot_bytes a multiple of the page size."""
        self._host = host
        self._step = max(1, _LOCK_STEP_BYTES // host.shape[1])
        self._lock = threading.Lock()
        self._tried: set[int] = set()
        self._locked: list[int] = []  # addresses
        self._is_closing = threading.Event()
        self._follower: threading.Thread | None = None

    def follow(self, backed_bytes: Callable[[], int]) -> None:
        """Lock in the background, step by step, what has memory already: `backed_bytes` tells how much has.

        Ends with the last step, with `close`, or when nothing has been added for a while.
        """
        self._follower = threading.Thread(target=self._follow, args=(backed_bytes,), name="page-lock", daemon=True)
        self._follower.start()

    def _follow(self, backed_bytes: Callable[[], int]) -> None:
        step_bytes = self._step * self._host.shape[1]
        num_steps, last_news = -(-len(self._host) // self._step), time.monotonic()
        index = 0
        while index < num_steps and time.monotonic() - last_news < _FOLLOW_S:
            if self._is_closing.wait(_FOLLOW_PAUSE_S):
                return
            if min((index + 1) * step_bytes, self._host.nbytes) <= backed_bytes():
                self.require(index * self._step, index * self._step)
                index, last_news = index + 1, time.monotonic()

    def require(self, first: int, last: int) -> None:
        """Slots [first, last] are locked, if they can be."""
        for index in range(first // self._step, last // self._step + 1):
            with self._lock:
                if index not in self._tried:
                    self._tried.add(index)
                    self._register(self._host[index * self._step : (index + 1) * self._step])

    def is_one_registration(self, first: int, last: int) -> bool:
        """Whether a copy may span slots [first, last]."""
        return bool(first // self._step == last // self._step)

    def _register(self, part: Bytes) -> None:
        result = int(_cudart().cudaHostRegister(part.ctypes.data, part.nbytes, 0))
        if result == 0:
            self._locked.append(part.ctypes.data)
        else:
            logger.warning("%d MiB of the CPU cache cannot be page-locked (CUDA error %d)", part.nbytes >> 20, result)

    def close(self) -> None:
        """Unlock; no copy may be under way."""
        self._is_closing.set()
        if self._follower is not None:
            self._follower.join()
        with self._lock:
            for address in self._locked:
                _cudart().cudaHostUnregister(address)
            self._locked.clear()


class CudaCopyEngine(CopyEngine):
    """One CUDA stream. `finish` sleeps on an event rather than spin."""

    batch_bytes = 256 << 20

    def __init__(self, device: torch.device, locked: LockedSlots) -> None:
        self._device = device
        self._locked = locked
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def context(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self._device))
        stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def make_fence(self) -> Fence:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))  # where steps run; a thread's current one is its own
        return event

    def wait(self, fence: Fence) -> None:
        if fence is not None:
            self._stream.wait_event(fence)

    def move_out(self, batch: Batch) -> list[PartSums]:
        sums = self.sum_pages(batch)
        for _, run in page_runs(batch.copied):
            for device_part, host_part in self._parts(batch.pool, batch.host, run, batch.share.pieces):
                host_part.copy_(device_part, non_blocking=True)
        return sums

    def move_in(self, batch: Batch) -> list[PartSums]:
        for _, run in page_runs(batch.copied):
            for device_part, host_part in self._parts(batch.pool, batch.host, run, batch.share.pieces):
                device_part.copy_(host_part, non_blocking=True)
        return self.sum_pages(batch)

    def _parts(
        self, pool: torch.Tensor, host: Bytes, run: PageRun, pieces: Sequence[Piece]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) views, each pair contiguous on both sides: torch would stage anything else."""
        step = len(run.slots)
        last = max(run.slots) + (run.count - 1) * step
        self._locked.require(min(run.slots), last)
        parts: list[tuple[Any, Any]] = []
        for piece in pieces:
            whole = (page_part(pool, run, piece), torch.from_numpy(slot_part(host, run, piece)))
            if self._locked.is_one_registration(min(run.slots), last) and all(part.is_contiguous() for part in whole):
                parts.append(whole)
            else:
                parts += zip(*whole, strict=True)
        return parts

    def finish(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def close(self) -> None:
        self._locked.close()
