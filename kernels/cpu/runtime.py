"""What all CPU operations share: compiled kernels, the thread team, the job being filled, scratch memory."""

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache

import torch

from kernels.cpu.ir import Function
from kernels.cpu.jit import InstructionSet, Target, best_instruction_set, get_compiler
from kernels.cpu.team import MAX_CHUNKS, ThreadTeam

_MAX_WORDS = 48
CHUNKS_PER_THREAD = 8  # enough that a thread that loses its core does not hold up the others for long
IS_BF16 = {torch.bfloat16: True, torch.float32: False}


@lru_cache
def _packer(num_words: int) -> Callable[..., None]:
    return struct.Struct(f"<{num_words}q").pack_into


class Runtime:
    """Runs kernels by name. Owned by one backend, used by one thread at a time."""

    def __init__(self, num_threads: int, instruction_set: InstructionSet | None) -> None:
        self._compiler = get_compiler(instruction_set or best_instruction_set())
        self._team = ThreadTeam(self._compiler, num_threads)
        self._job = ctypes.create_string_buffer(8 * _MAX_WORDS)
        self._job_address = ctypes.addressof(self._job)
        self._scratch: dict[str, torch.Tensor] = {}

    @property
    def target(self) -> Target:
        return self._compiler.target

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    def kernel(self, name: str, build: Callable[[Target, str], Function]) -> int:
        """Address of a kernel, compiled on first use (milliseconds)."""
        return self._compiler.address(name, build)

    def run(self, body: int, prologue: int, num_chunks: int, words: tuple[int, ...], *, is_long: bool = False) -> None:
        """Run one job with its argument words; a long one releases the interpreter lock.

        Raises ValueError for more chunks than the team can count.
        """
        if num_chunks > MAX_CHUNKS:
            raise ValueError(f"a job has {num_chunks} chunks, at most {MAX_CHUNKS} can be counted")
        _packer(3 + len(words))(self._job, 0, body, prologue, num_chunks, *words)
        self._team.launch(self._job_address, is_long)

    def chunk_size(self, count: int, multiple: int, chunks_per_thread: int = CHUNKS_PER_THREAD) -> int:
        """Items of a chunk, a multiple of `multiple`, so that `count` items make the wanted number of chunks."""
        if self.num_threads == 1:
            return max(count, 1)
        share = -(-count // (self.num_threads * chunks_per_thread))
        return -(-share // multiple) * multiple

    def scratch(self, name: str, num_bytes: int) -> int:
        """Address of a buffer that keeps its place until a larger one is asked for by the same name."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._scratch[name] = torch.empty(num_bytes * 5 // 4 + 64, dtype=torch.uint8)
        return buffer.data_ptr()

    def close(self) -> None:
        """End the worker threads; the runtime still works, alone."""
        self._team.close()


def is_bf16(x: torch.Tensor) -> bool:
    """Whether the model dtype is bfloat16 (else float32); raises TypeError for any other."""
    try:
        return IS_BF16[x.dtype]
    except KeyError as error:
        raise TypeError(f"the CPU kernels take bfloat16 and float32, not {x.dtype}") from error


def check_same_layout(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Kernels read plain memory: all must be contiguous and of x's dtype. Raises ValueError otherwise."""
    for other in others:
        if other is not None and not (other.dtype is x.dtype and other.is_contiguous()):
            raise ValueError(
                f"expected contiguous {x.dtype} tensors, got {other.dtype} with shape {tuple(other.shape)} "
                f"and strides {other.stride()}"
            )


def check_source(x: torch.Tensor, weight: torch.Tensor) -> None:
    """What a norm reads: the residual stream, which is float32 whatever the model dtype, or the model dtype."""
    if x.dtype is not torch.float32:
        check_same_layout(x, weight)
    is_bf16(weight)
