"""Tensors in huge pages: weights and pools are read once a step, and 4 KiB pages cost a fifth of a batch-1 step."""

import mmap

import torch

_HUGE_PAGE = 2 << 20


def empty_huge(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor (zeros, as the kernel hands them out) that asks for transparent huge pages.

    Address space is rounded up to 2 MiB, so put many small weights into one tensor. Where the system has no such
    pages this is an ordinary tensor. Memory is taken when first touched and given back with the last view.
    """
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    memory = mmap.mmap(-1, max(num_bytes, 1) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:
            pass  # a kernel without transparent huge pages
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = -flat.data_ptr() % _HUGE_PAGE
    return flat[start : start + num_bytes].view(dtype).view(shape)
