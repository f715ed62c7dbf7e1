"""Named int64 words that a job carries to its kernel."""

import struct
from functools import lru_cache

from kernels.cpu.ir import F32, I64, Function, Value


class Arguments:
    """The words of a job, loaded by name inside a kernel: `Arguments(f, NAMES).k` is the word called "k"."""

    def __init__(self, f: Function, names: tuple[str, ...]) -> None:
        self._f, self._base = f, f.args[0]
        self._offsets = {name: 8 * index for index, name in enumerate(names)}
        self._loaded = {name: f.load(self._base + offset, I64) for name, offset in self._offsets.items()}

    def __getattr__(self, name: str) -> Value:
        return self._loaded[name]

    def float(self, name: str) -> Value:
        """The word as a float32 (packed by `float_bits`)."""
        return self._f.load(self._base + self._offsets[name], F32)


@lru_cache
def float_bits(number: float) -> int:
    """A float32 as the int64 word that `Arguments.float` reads."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
