"""Runs linear layers: chooses the kernel by the number of tokens only; every way reads the same weights.

Measured on two cores with AVX512-BF16: these kernels are ahead of oneDNN and MKL at every size (bf16 at 512 tokens: 422
against 400 GFLOP/s), so a library is called only for bf16 where the CPU lacks the bf16 dot product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.cpu.arguments import float_bits
from kernels.cpu.linear import (
    MAX_DOT_TOKENS,
    Epilogue,
    build_dot,
    build_lanes,
    build_norm_prologue,
    build_pack,
    lanes_groups,
    lanes_shape,
    num_tiles,
    packed_bytes,
)
from kernels.cpu.norm_op import NormOps
from kernels.cpu.runtime import Runtime, check_same_layout, check_source, is_bf16

_CACHED_WEIGHT_BYTES = 256 * 1024  # of a chunk: half of a small second-level cache
_MAX_TOKENS_WITHOUT_BF16_DOT = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape of layer runs."""

    body: int
    norm_prologue: int  # for the dot kernel
    pack: int  # for the lanes kernel; 0 for the dot kernel
    num_tiles: int
    packed_bytes: int
    normed_bytes: int
    rows_per_chunk: int
    num_chunks: int


class LinearOp:
    """Linear layers of one epilogue: bias, residual or SwiGLU after them, RMSNorm before them if wanted."""

    def __init__(self, runtime: Runtime, norms: NormOps, epilogue: Epilogue, max_own_tokens: int | None) -> None:
        self._runtime, self._norms, self._epilogue = runtime, norms, epilogue
        self._max_own_tokens = max_own_tokens
        self._plans: dict[tuple[int, int, int, torch.dtype, bool], Plan | None] = {}
        self._halves = 2 if epilogue is Epilogue.GATE_UP else 1
        self._is_wide = epilogue in (Epilogue.RESIDUAL, Epilogue.LOGITS)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """out [T, N] from x [T, K] and weight [N, K] ([2N, K] in gate-up mode).

        x has the weight's dtype, or float32 before a norm; out has the weight's, or float32 for residual and logits.
        """
        if not x.is_contiguous():
            x = x.contiguous()
        check_same_layout(weight, weight, bias, norm_weight)
        check_dtypes(x, weight, out, norm_weight is not None, self._is_wide)
        num_tokens, k = x.shape
        n = out.shape[1]
        if weight.shape != (n * self._halves, k) or out.shape[0] != num_tokens:
            raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not fit")
        source_bf16 = norm_weight is not None and is_bf16(x)  # what a norm reads; else the kernels are the same
        key = (num_tokens, k, n, weight.dtype, source_bf16)
        if key not in self._plans:
            self._plans[key] = self._plan(num_tokens, k, n, is_bf16(weight), source_bf16)
        plan = self._plans[key]
        if plan is None:
            self._run_library(x, weight, out, bias, norm_weight, eps)
            return
        runtime = self._runtime
        source = activations = x.data_ptr()
        normed = runtime.scratch("normed", plan.normed_bytes) if norm_weight is not None else 0
        if plan.pack:
            activations = runtime.scratch("packed", plan.packed_bytes)
        elif normed:
            activations = normed
        words = (
            activations,
            weight.data_ptr(),
            out.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            num_tokens,
            n,
            k,
            plan.rows_per_chunk,
            source,
            normed,
            norm_weight.data_ptr() if norm_weight is not None else 0,
            float_bits(eps),
        )
        if plan.pack:
            runtime.run(plan.pack, 0, plan.num_tiles, words)
            runtime.run(plan.body, 0, plan.num_chunks, words, is_long=True)
        else:
            runtime.run(plan.body, plan.norm_prologue if normed else 0, plan.num_chunks, words)

    def _plan(self, num_tokens: int, k: int, n: int, bf16: bool, source_bf16: bool) -> Plan | None:
        """None: through the library."""
        runtime, target = self._runtime, self._runtime.target
        limit = self._max_own_tokens
        if self._epilogue is Epilogue.LOGITS:
            limit = None  # a library would round them to the model dtype
        elif limit is None and bf16 and not target.has_bf16_dot:
            limit = _MAX_TOKENS_WITHOUT_BF16_DOT
        if limit is not None and num_tokens > limit:
            return None
        is_dot = num_tokens <= MAX_DOT_TOKENS
        columns = num_tokens if is_dot else lanes_groups(target, num_tokens)
        body, norm, pack = self.compile(is_dot, columns, k, bf16, source_bf16)
        size = 2 if bf16 else 4
        block = target.lanes if is_dot else lanes_shape(target, self._epilogue, columns).rows
        cached_rows = max(_CACHED_WEIGHT_BYTES // (k * size * block), 1) * block
        rows_per_chunk = min(runtime.chunk_size(n, block), cached_rows)
        return Plan(
            body=body,
            norm_prologue=norm,
            pack=pack,
            num_tiles=0 if is_dot else num_tiles(target, num_tokens),
            packed_bytes=0 if is_dot else packed_bytes(target, num_tokens, k),
            normed_bytes=num_tokens * k * size,
            rows_per_chunk=rows_per_chunk,
            num_chunks=-(-n // rows_per_chunk),
        )

    def compile(
        self, is_dot: bool, columns: int, k: int, bf16: bool, source_bf16: bool = False
    ) -> tuple[int, int, int]:
        """Addresses of (kernel, norm for dot, pack for lanes) for a number of tokens or of groups of tokens.

        bf16: the weights; source_bf16: what a norm reads (the residual stream is float32).
        """
        code, source = ("bf16" if is_bf16 else "f32" for is_bf16 in (bf16, source_bf16))
        name = f"{'dot' if is_dot else 'lanes'}-{self._epilogue.value}-{columns}-{k}-{code}"
        body = self._runtime.kernel(name, build_dot if is_dot else build_lanes)
        if is_dot:
            return body, self._runtime.kernel(f"norm_rows-{source}-{code}", build_norm_prologue), 0
        return body, 0, self._runtime.kernel(f"pack-{columns}-{source}-{code}", build_pack)

    def _run_library(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Through oneDNN, with torch's own threads."""
        if norm_weight is not None:
            x = self._norms.rms_norm(x, norm_weight, eps)
        product = F.linear(x, weight, bias)
        if self._epilogue is Epilogue.GATE_UP:
            self._norms.silu_and_mul(product, out)
        elif self._epilogue is Epilogue.RESIDUAL:
            out += product
        else:
            out.copy_(product)


def check_dtypes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, has_norm: bool, is_wide: bool) -> None:
    """Raises ValueError unless x and out are contiguous and of the dtypes that `LinearOp.run` states."""
    if has_norm:
        check_source(x, weight)
    else:
        check_same_layout(weight, x)
    if not is_wide:
        check_same_layout(weight, out)
    elif out.dtype is not torch.float32 or not out.is_contiguous():
        raise ValueError(f"residual and logits are contiguous float32, not {out.dtype} with strides {out.stride()}")
