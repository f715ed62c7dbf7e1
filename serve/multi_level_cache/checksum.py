"""The 64-bit checksum of a page's extents, in numpy. The formula and its reasons stand in `kernels.checksum_weights`.

A checksum is the weighted sum of an extent unit's words plus a seed that says which page, which group, which unit and
how long: bytes that are right but belong elsewhere do not pass. It finds accidents; it does not stop an attacker.
"""

from collections.abc import Sequence

import numpy as np

from kernels.checksum_weights import ROW_BYTES, ROW_WORDS, Words, column_weights, mix64, num_rows, row_weights

Buffer = bytes | bytearray | memoryview | np.ndarray

_CHUNK_ROWS = 256  # 128 KiB: the temporary stays in the cache


def unit_seeds(names: Sequence[bytes], group_index: int, unit_bytes: Sequence[int]) -> Words:
    """Seeds [num_names, num_units] of the units of pages called `names`; unit u has `unit_bytes[u]` bytes."""
    heads = np.array([int.from_bytes(name[:8], "little") for name in names], dtype=np.uint64).reshape(-1, 1)
    units = np.arange(len(unit_bytes), dtype=np.uint64) + (np.uint64(group_index) << np.uint64(32))
    return mix64(mix64(mix64(heads) + units) + np.asarray(unit_bytes, dtype=np.uint64))


def weighted_sum(extent: Buffer) -> int:
    """The sum without a seed, of any contiguous bytes."""
    data = np.frombuffer(extent, dtype=np.uint8)
    rows = num_rows(len(data))
    whole = len(data) // ROW_BYTES
    total = _sum_rows(_as_rows(data[: whole * ROW_BYTES]), 0, rows) if whole else 0
    if whole < rows:
        last = np.zeros(ROW_BYTES, dtype=np.uint8)
        last[: len(data) - whole * ROW_BYTES] = data[whole * ROW_BYTES :]
        total += _sum_rows(_as_rows(last), whole, rows)
    return total % (1 << 64)


def checksum(extent: Buffer, seed: int) -> int:
    """Checksum of one extent unit, with its seed from `unit_seeds`."""
    return (weighted_sum(extent) + seed) % (1 << 64)


def object_checksums(payload: Buffer, unit_bytes: Sequence[int], seeds: Words) -> Words:
    """Checksums [num_units] of one object whose units lie one behind the other. seeds: [num_units]."""
    data = np.frombuffer(payload, dtype=np.uint8)
    sums, start = np.empty(len(unit_bytes), dtype=np.uint64), 0
    for index, length in enumerate(unit_bytes):
        sums[index] = weighted_sum(data[start : start + length])
        start += length
    return sums + seeds


def _as_rows(data: np.ndarray) -> Words:
    return data.view(np.uint64).reshape(-1, ROW_WORDS)


def _sum_rows(words: Words, first_row: int, total_rows: int) -> int:
    """Sum of rows [first_row, first_row + len(words)) of an extent of `total_rows`."""
    column_low, column_high = column_weights()
    row_low, row_high = row_weights(total_rows)
    total = 0
    high_words = np.empty((min(_CHUNK_ROWS, len(words)), ROW_WORDS), dtype=np.uint64)
    for start in range(0, len(words), _CHUNK_ROWS):
        chunk = words[start : start + _CHUNK_ROWS]
        upper = np.right_shift(chunk, np.uint64(32), out=high_words[: len(chunk)])
        at = slice(first_row + start, first_row + start + len(chunk))
        total += int(np.einsum("r,r->", np.einsum("rc,c->r", chunk, column_low), row_low[at]))
        total += int(np.einsum("r,r->", np.einsum("rc,c->r", upper, column_high), row_high[at]))
    return total
