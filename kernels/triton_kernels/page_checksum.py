"""The page checksum of `kernels.checksum_weights`, one program a (unit, block of rows).

Sums of integers mod 2^64 do not depend on their order, so the programs of a unit add theirs to its result.
"""

import torch
import triton
import triton.language as tl

from kernels.checksum_weights import ROW_WORDS


@triton.jit(do_not_specialize=["units_a_page"])
def _page_checksum_kernel(
    words_ptr, sums_ptr, row_low_ptr, row_high_ptr, column_low_ptr, column_high_ptr, num_rows, units_a_page,
    page_stride, unit_stride, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WORDS)
    inside = rows < num_rows
    page = (unit // units_a_page).to(tl.int64)
    source = words_ptr + page * page_stride + (unit % units_a_page).to(tl.int64) * unit_stride
    words = tl.load(source + rows[:, None] * WORDS + columns[None, :], mask=inside[:, None], other=0)
    low = tl.sum(words * tl.load(column_low_ptr + columns)[None, :], 1)
    high = tl.sum(((words >> 32) & 0xFFFFFFFF) * tl.load(column_high_ptr + columns)[None, :], 1)
    row_low = tl.load(row_low_ptr + rows, mask=inside, other=0)
    row_high = tl.load(row_high_ptr + rows, mask=inside, other=0)
    tl.atomic_add(sums_ptr + unit, tl.sum(low * row_low + high * row_high, 0), sem="relaxed")


def add_page_checksums(
    words: torch.Tensor,
    sums: torch.Tensor,
    row_weights: tuple[torch.Tensor, torch.Tensor],
    column_weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """sums int64 [pages, units], contiguous, += checksums of words int64 [pages, units, rows * ROW_WORDS].

    The last dimension of words is contiguous. Weights are the tables of `checksum_weights` on the device, of rows
    (at least as many as there are) and of columns.
    """
    num_pages, units_a_page, num_words = words.shape
    rows, block = num_words // ROW_WORDS, 32
    _page_checksum_kernel[(num_pages * units_a_page, triton.cdiv(rows, block))](
        words, sums, *row_weights, *column_weights, rows, units_a_page, words.stride(0), words.stride(1),
        ROWS=block, WORDS=ROW_WORDS, num_warps=4,
    )  # fmt: skip
