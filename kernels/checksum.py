"""Page checksums on tensors: a Triton kernel on CUDA, compiled loops on a CPU, torch int64 operations (which wrap like
uint64) anywhere else and for bytes that are not whole rows.

The same bits as `serve.multi_level_cache.checksum` (numpy) and `kernels.cpu.checksum` (numba).
"""

from functools import lru_cache

import numpy as np
import torch

from kernels.checksum_weights import ROW_BYTES, ROW_WORDS, column_weights, num_rows, row_weights

_ROWS_AT_ONCE = 1 << 15  # 16 MiB of words: bounds the temporaries


def page_checksums(units: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Checksums of extent units.

    units: uint8 [..., num_bytes], last dimension contiguous. seeds: int64 [...], the bits of `unit_seeds`. Returns
    int64 [...], the bits of the uint64 checksums. Raises ValueError on another dtype or on shapes that do not fit.
    """
    if units.dtype != torch.uint8 or seeds.dtype != torch.int64 or seeds.shape != units.shape[:-1]:
        raise ValueError(
            f"uint8 [..., bytes] and int64 [...] expected, not {units.dtype} {tuple(units.shape)}, {seeds.dtype}"
        )
    if units.is_cuda and units.dim() == 3 and _has_whole_rows(units):
        return _sum_with_triton(units, seeds)
    flat = units.reshape(-1, units.shape[-1])  # [num_units, num_bytes]
    rows = num_rows(flat.shape[1])
    if flat.shape[1] != rows * ROW_BYTES:
        flat = torch.nn.functional.pad(flat, (0, rows * ROW_BYTES - flat.shape[1]))
    words = _as_words(flat)
    if units.device.type == "cpu":
        from kernels.cpu.checksum import sum_units

        sums = sum_units(words.numpy().view(np.uint64), *row_weights(rows), *column_weights()).view(np.int64)
        return torch.from_numpy(sums).view(seeds.shape) + seeds
    return _sum_with_torch(words.view(flat.shape[0], rows, ROW_WORDS)).view(seeds.shape) + seeds


def _has_whole_rows(units: torch.Tensor) -> bool:
    """Whether units [pages, units, bytes] can be read as words in place."""
    strides = all(stride % 8 == 0 for stride in units.stride()[:2])
    return units.shape[2] % ROW_BYTES == 0 and strides and units.stride(2) == 1 and units.data_ptr() % 8 == 0


def _sum_with_triton(units: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    from kernels.triton_kernels.page_checksum import add_page_checksums

    sums = seeds.clone(memory_format=torch.contiguous_format)
    if units.numel():
        rows, columns = _device_weights(num_rows(units.shape[2]), units.device)
        add_page_checksums(units.view(torch.int64), sums, rows, columns)
    return sums


_Pair = tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=8)
def _device_weights(rows: int, device: torch.device) -> tuple[_Pair, _Pair]:
    """Row and column weights on a device; they never change. Ready for every stream."""
    (row_low, row_high), (column_low, column_high) = row_weights(rows), column_weights()
    on_device = [_to_device(table, device) for table in (row_low, row_high, column_low, column_high)]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return (on_device[0], on_device[1]), (on_device[2], on_device[3])


def _sum_with_torch(words: torch.Tensor) -> torch.Tensor:
    """Sums [num_units] of int64 words [num_units, num_rows, ROW_WORDS], on any device."""
    num_units, rows, _ = words.shape
    sums = torch.zeros(num_units, dtype=torch.int64, device=words.device)
    step = max(1, _ROWS_AT_ONCE // max(num_units, 1))
    (row_low, row_high), (column_low, column_high) = _device_weights(rows, words.device)
    for start in range(0, rows, step):
        chunk = words[:, start : start + step]  # [num_units, step, ROW_WORDS]
        low = (chunk * column_low).sum(-1)
        high = (((chunk >> 32) & 0xFFFFFFFF) * column_high).sum(-1)
        sums += (low * row_low[start : start + step] + high * row_high[start : start + step]).sum(-1)
    return sums


def _as_words(flat: torch.Tensor) -> torch.Tensor:
    """int64 view of uint8 [N, multiple of 8]; copies only what is not aligned to 8 bytes."""
    aligned = flat.storage_offset() % 8 == 0 and flat.stride(0) % 8 == 0 and flat.stride(1) == 1
    return (flat if aligned and flat.data_ptr() % 8 == 0 else flat.clone(memory_format=torch.contiguous_format)).view(
        torch.int64
    )


def _to_device(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table.view(np.int64).copy()).to(device)
