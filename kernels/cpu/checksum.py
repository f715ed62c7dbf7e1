"""The page checksum's sum as one numba loop, for the disk tier and for workers on a CPU."""

import numba
import numpy as np

from kernels.checksum_weights import ROW_WORDS, Words


@numba.njit(cache=True, nogil=True)
def sum_words(words: Words, row_low: Words, row_high: Words, column_low: Words, column_high: Words) -> np.uint64:
    """Weighted sum of words [n], the last row not always full; the formula stands in `kernels.checksum_weights`."""
    total = np.uint64(0)
    shift = np.uint64(32)
    num_rows = len(words) // ROW_WORDS
    for row in range(num_rows):
        low, high = np.uint64(0), np.uint64(0)
        for column in range(ROW_WORDS):
            word = words[row * ROW_WORDS + column]
            low += word * column_low[column]
            high += (word >> shift) * column_high[column]
        total += low * row_low[row] + high * row_high[row]
    low, high = np.uint64(0), np.uint64(0)
    for column in range(len(words) - num_rows * ROW_WORDS):
        word = words[num_rows * ROW_WORDS + column]
        low += word * column_low[column]
        high += (word >> shift) * column_high[column]
    if len(words) > num_rows * ROW_WORDS:
        total += low * row_low[num_rows] + high * row_high[num_rows]
    return total


@numba.njit(cache=True, nogil=True)
def sum_units(units: Words, row_low: Words, row_high: Words, column_low: Words, column_high: Words) -> Words:
    """`sum_words` of each row of units [num_units, num_words] -> [num_units]."""
    sums = np.empty(len(units), dtype=np.uint64)
    for index in range(len(units)):
        sums[index] = sum_words(units[index], row_low, row_high, column_low, column_high)
    return sums
