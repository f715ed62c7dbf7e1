"""RMSNorm and SiLU-and-multiply over rows."""

import torch

from kernels.cpu.arguments import float_bits
from kernels.cpu.norm import build_rms_norm, build_silu_and_mul
from kernels.cpu.runtime import Runtime, check_same_layout, check_source, is_bf16

_MIN_CHUNK_BYTES = 16_384  # less is not worth waking a thread for


class NormOps:
    """Elementwise operations on rows."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _chunks(self, num_rows: int, row_bytes: int) -> tuple[int, int]:
        """(rows of a chunk, chunks)."""
        rows = max(self._runtime.chunk_size(num_rows, 1), -(-_MIN_CHUNK_BYTES // max(row_bytes, 1)))
        return rows, -(-num_rows // rows)

    def compile(self, bf16: bool) -> None:
        code = "bf16" if bf16 else "f32"
        self._runtime.kernel(f"rms_norm-f32-{code}", build_rms_norm)
        self._runtime.kernel(f"silu_and_mul_{code}", build_silu_and_mul)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] (of weight's dtype or float32) normalised over its last dimension -> fresh, of weight's dtype."""
        x = x.contiguous()
        check_source(x, weight)
        codes = "-".join("bf16" if is_bf16(tensor) else "f32" for tensor in (x, weight))
        out, size = torch.empty(x.shape, dtype=weight.dtype), x.shape[-1]
        num_rows = x.numel() // size
        rows, chunks = self._chunks(num_rows, size * x.element_size())
        self._runtime.run(
            self._runtime.kernel(f"rms_norm-{codes}", build_rms_norm),
            0,
            chunks,
            (x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, size, rows, float_bits(eps)),
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""
        gate_up = gate_up.contiguous()
        check_same_layout(gate_up, out)
        code = "bf16" if is_bf16(gate_up) else "f32"
        num_rows, size = out.shape
        rows, chunks = self._chunks(num_rows, size * out.element_size() * 3)
        self._runtime.run(
            self._runtime.kernel(f"silu_and_mul_{code}", build_silu_and_mul),
            0,
            chunks,
            (gate_up.data_ptr(), out.data_ptr(), num_rows, size, rows),
        )
