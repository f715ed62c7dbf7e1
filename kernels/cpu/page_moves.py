"""Moves pages between a pool and host slots and sums them on the way, a whole batch in one call without the GIL.

A thread that copies beside one that computes gets the interpreter lock back only at the next switch interval (5 ms)
after each call that released it: one call a page and one a checksum would make the copy many times slower than memcpy,
and each time keep the computing thread waiting.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.checksum_weights import Words
from kernels.cpu.checksum import sum_words

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


@intrinsic
def _copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    """memcpy between addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return numba.types.void(numba.int64, numba.int64, numba.int64), generate


@numba.njit(cache=True, nogil=True)
def move_pages(
    is_store: bool,
    words: Words,
    pool_address: int,
    host_address: int,
    slot_bytes: int,
    pages: Numbers,
    slots: Numbers,
    is_copied: Bytes,
    pieces: Numbers,
    units: Numbers,
    row_low: Words,
    row_high: Words,
    column_low: Words,
    column_high: Words,
    sums: Words,
    stop: Bytes,
) -> int:
    """Returns how many objects were done: fewer than all when `stop` [1] was set meanwhile.

    A unit is summed right before it is copied out, or right after it was copied in, while it is in the cache.
    words: the pool, uint64 [num_pages, words of a page]; the addresses are those of its and of the host's first byte.
    pages: [n]; slots: [n, slots of an object]; is_copied: [n], 0 sums without copying. pieces: [any, 4] of
    (slot index, offset in the slot, offset in the page, length) in bytes. units: [num_units, 2] of (offset in the page,
    length), multiples of 8 bytes. Weights: as for `sum_words`, rows as many as the longest unit has. sums: [n,
    num_units], written.
    """
    page_bytes = words.shape[1] * 8
    for index in range(len(pages)):
        if stop[0]:
            return index
        page = pages[index]
        for unit in range(len(units)):
            start, end = units[unit, 0], units[unit, 0] + units[unit, 1]
            if not is_store and is_copied[index]:
                _move_unit(
                    False, pool_address + page * page_bytes, host_address, slot_bytes, slots[index], pieces, start, end
                )
            part = words[page, start // 8 : end // 8]
            sums[index, unit] = sum_words(part, row_low, row_high, column_low, column_high)
            if is_store and is_copied[index]:
                _move_unit(
                    True, pool_address + page * page_bytes, host_address, slot_bytes, slots[index], pieces, start, end
                )
    return len(pages)


@numba.njit(cache=True, nogil=True)
def _move_unit(
    is_store: bool,
    page_address: int,
    host_address: int,
    slot_bytes: int,
    slots: Numbers,
    pieces: Numbers,
    start: int,
    end: int,
) -> None:
    """Copy bytes [start, end) of a page."""
    for piece in range(len(pieces)):
        first = max(start, pieces[piece, 2])
        size = min(end, pieces[piece, 2] + pieces[piece, 3]) - first
        if size > 0:
            in_slot = pieces[piece, 1] + first - pieces[piece, 2]
            host = host_address + slots[pieces[piece, 0]] * slot_bytes + in_slot
            if is_store:
                _copy_bytes(host, page_address + first, size)
            else:
                _copy_bytes(page_address + first, host, size)
