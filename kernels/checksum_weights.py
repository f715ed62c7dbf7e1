"""Weights of the page checksum, shared by its torch, numba and numpy versions. numpy only.

For an extent seen as uint64 words w[r, c] in rows of `ROW_WORDS` (the last row padded with zeros), mod 2^64:

    sum over r of ( a[r] * sum over c of w[r, c] * p[c]   +   b[r] * sum over c of (w[r, c] >> 32) * q[c] )

All weights are odd, so that every single-bit flip shows: a flip of bit k < 32 changes the sum by an odd multiple of
2^k, one of bit k >= 32 by an odd multiple of 2^(k - 32). The second term keeps the upper bits (signs and exponents)
alive, that an odd weight alone cannot tell apart in pairs: 2^63 times any two odd numbers is the same. Products
a[r] * p[c] make the weight of a word depend on its row and column together, so that swaps of rows, columns and
rectangles show too.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

ROW_WORDS = 64
ROW_BYTES = ROW_WORDS * 8

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROW_LOW, _ROW_HIGH, _COLUMN_LOW, _COLUMN_HIGH = (np.uint64(n << 48) for n in (1, 2, 3, 4))
_MIN_ROWS = 4096


def mix64(value: Words) -> Words:
    """splitmix64 of each element (Steele, Lea, Flood 2014): a bijection, each input bit reaches all output bits."""
    mixed = value + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _odd_weights(stream: np.uint64, count: int) -> Words:
    return mix64(np.arange(count, dtype=np.uint64) + stream) | np.uint64(1)


@lru_cache(maxsize=1)
def column_weights() -> tuple[Words, Words]:
    """p and q, each [ROW_WORDS]."""
    return _odd_weights(_COLUMN_LOW, ROW_WORDS), _odd_weights(_COLUMN_HIGH, ROW_WORDS)


@lru_cache(maxsize=8)
def _row_table(count: int) -> tuple[Words, Words]:
    return _odd_weights(_ROW_LOW, count), _odd_weights(_ROW_HIGH, count)


def row_weights(num_rows: int) -> tuple[Words, Words]:
    """a and b, each [num_rows]; views of tables that grow by doubling."""
    low, high = _row_table(max(_MIN_ROWS, 1 << max(num_rows - 1, 0).bit_length()))
    return low[:num_rows], high[:num_rows]


def num_rows(num_bytes: int) -> int:
    """Rows that an extent of `num_bytes` fills, the last one padded."""
    return -(-num_bytes // ROW_BYTES)
