"""Chooses how a linear layer runs, by the number of tokens only; every way reads the same weights."""

import torch
import torch.nn.functional as F

from kernels.cpu.arguments import float_bits
from kernels.cpu.linear import (
    MAX_DOT_TOKENS,
    Epilogue,
    build_dot,
    build_lanes,
    build_norm_pack_prologue,
    build_norm_prologue,
    build_pack_prologue,
    lanes_groups,
    lanes_shape,
    packed_tokens,
)
from kernels.cpu.norm_op import NormOps
from kernels.cpu.runtime import Runtime, check_same_layout, is_bf16


class LinearOps:
    """Linear layers with what is fused into them: RMSNorm before; bias, residual or SwiGLU after."""

    def __init__(self, runtime: Runtime, norms: NormOps, max_streaming_tokens: int) -> None:
        self._runtime, self._norms = runtime, norms
        self._max_streaming_tokens = max_streaming_tokens
        self._bodies: dict[tuple[object, ...], tuple[int, int]] = {}
        self._prologues: dict[tuple[object, ...], int] = {}

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        epilogue: Epilogue,
        bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """out [T, N] from x [T, K] and weight [N, K] ([2N, K] in gate-up mode)."""
        num_tokens, k = x.shape
        if not x.is_contiguous():
            x = x.contiguous()
        check_same_layout(x, weight, out, bias, norm_weight)
        rows = out.shape[1] * 2 if epilogue is Epilogue.GATE_UP else out.shape[1]
        if weight.shape[1] != k or weight.shape[0] != rows or out.shape[0] != num_tokens:
            raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not fit")
        if num_tokens <= self._max_streaming_tokens:
            self._run_streaming(x, weight, out, epilogue, bias, norm_weight, eps)
        else:
            self._run_library(x, weight, out, epilogue, bias, norm_weight, eps)

    def _run_streaming(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        epilogue: Epilogue,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        runtime, bf16 = self._runtime, is_bf16(x)
        (num_tokens, k), n = x.shape, out.shape[1]
        size, has_norm = 2 if bf16 else 4, norm_weight is not None
        is_dot = num_tokens <= MAX_DOT_TOKENS
        body, block_rows = self._body(epilogue, num_tokens, k, bf16)
        source = activations = x.data_ptr()
        normed = runtime.scratch("normed", num_tokens * k * size) if has_norm else 0
        if is_dot:
            activations = normed or source
        else:
            activations = runtime.scratch("packed", packed_tokens(runtime.target, num_tokens) * (k + 1) * size)
        rows_per_chunk = runtime.chunk_size(n, block_rows)
        runtime.run(
            body,
            self._prologue(is_dot, has_norm, bf16),
            -(-n // rows_per_chunk),
            activations,
            weight.data_ptr(),
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            num_tokens,
            k,
            n,
            rows_per_chunk,
            source,
            normed,
            0 if norm_weight is None else norm_weight.data_ptr(),
            float_bits(eps),
            is_long=num_tokens > MAX_DOT_TOKENS,
        )

    def _body(self, epilogue: Epilogue, num_tokens: int, k: int, bf16: bool) -> tuple[int, int]:
        """(address, rows of a register block) of the kernel for this many tokens."""
        target = self._runtime.target
        is_dot = num_tokens <= MAX_DOT_TOKENS
        columns = num_tokens if is_dot else lanes_groups(target, num_tokens)
        key = (epilogue, is_dot, columns, k, bf16)
        found = self._bodies.get(key)
        if found is None:
            name = f"{'dot' if is_dot else 'lanes'}-{epilogue.value}-{columns}-{k}-{'bf16' if bf16 else 'f32'}"
            rows = target.lanes if is_dot else lanes_shape(target, epilogue, columns).rows
            found = self._bodies[key] = (self._runtime.kernel(name, build_dot if is_dot else build_lanes), rows)
        return found

    def _prologue(self, is_dot: bool, has_norm: bool, bf16: bool) -> int:
        key = (is_dot, has_norm, bf16)
        found = self._prologues.get(key)
        if found is None:
            code = "bf16" if bf16 else "f32"
            if is_dot:
                found = self._runtime.kernel(f"norm_rows_{code}", build_norm_prologue) if has_norm else 0
            elif has_norm:
                found = self._runtime.kernel(f"norm_pack_{code}", build_norm_pack_prologue)
            else:
                found = self._runtime.kernel(f"pack_{code}", build_pack_prologue)
            self._prologues[key] = found
        return found

    def _run_library(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        epilogue: Epilogue,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Through oneDNN (bfloat16) or MKL (float32), with torch's own threads."""
        if norm_weight is not None:
            x = self._norms.rms_norm(x, norm_weight, eps)
        product = F.linear(x, weight, bias)
        if epilogue is Epilogue.GATE_UP:
            self._norms.silu_and_mul(product, out)
        elif epilogue is Epilogue.RESIDUAL:
            out += product
        else:
            out.copy_(product)
