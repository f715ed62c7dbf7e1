"""Copies of a few bytes between page-locked host memory and the device by a kernel.

The copy engines work in order: behind pages that are on their way to or from the CPU, a step's few bytes would wait for
milliseconds.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _host_copy_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target_ptr + places, tl.load(source_ptr + places, mask=inside), mask=inside)


def host_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """target = source, of one dtype and number of elements, contiguous; one is on the device, one page-locked.

    The caller keeps the page-locked one until the copy is over: no allocator knows of it.
    """
    count = source.numel()
    if count:
        _host_copy_kernel[(triton.cdiv(count, 1024),)](source, target, count, BLOCK=1024, num_warps=4)
