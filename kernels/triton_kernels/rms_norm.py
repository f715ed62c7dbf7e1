"""RMSNorm (Zhang and Sennrich 2019), one program a row, statistics in float32."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, row_stride, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False) -> torch.Tensor:
    """Normalise the last dimension of x [..., H] (rows contiguous) by weight [H] -> fresh tensor of x's shape."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty_like(rows)
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // 1024, 1), 8)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, weight, out, rows.stride(0), width, eps, BLOCK=block, PDL=pdl,
        num_warps=num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out.view(x.shape)
