"""The backend for CUDA devices: Triton kernels beside cuBLAS matrix products and cuDNN attention."""

import torch
import torch.nn.functional as F

from kernels.interface import AttentionBatch, KernelBackend
from kernels.long_attention import long_attention
from kernels.triton_kernels.experts import experts_mlp
from kernels.triton_kernels.paged_decode import paged_decode
from kernels.triton_kernels.paged_prefill import paged_prefill
from kernels.triton_kernels.rms_norm import rms_norm
from kernels.triton_kernels.rope_and_store import rope_and_store
from kernels.triton_kernels.silu_and_mul import silu_and_mul
from kernels.triton_kernels.skinny_linear import Fusion, Workspace, few_tokens_linear, one_token_linear, residual_tiling

# Runs of at least this many new tokens go through cuDNN, which is faster where there is enough to do.
LONG_RUN = 2048
_NO_LIMIT = 1 << 30


class CudaBackend(KernelBackend):
    """Runs the contract with Triton; bfloat16 and float32. float32 products never use tf32 (torch's default).

    Every Triton kernel of a decode step waits for the kernel before it by itself (programmatic dependent launch), and
    may start before that has ended.
    """

    def __init__(self) -> None:
        has_gpu = torch.cuda.is_available()
        self._pdl = has_gpu and torch.cuda.get_device_capability() >= (9, 0)
        self._has_cudnn = has_gpu and torch.backends.cudnn.is_available()
        self._workspace: Workspace | None = None

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] != 1:
            return F.linear(x, weight, bias)
        return self._one_token(x, weight, Fusion(bias=bias))

    def linear_residual(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        if x.shape[0] == 1:
            one_token_linear(x, weight, residual, Fusion(bias=bias, residual=True), pdl=self._pdl)
            return
        tiling = residual_tiling(x, weight)
        if tiling is not None:
            fusion = Fusion(bias=bias, residual=True)
            few_tokens_linear(x, weight, residual, fusion, tiling, self._work(x), pdl=self._pdl)
            return
        residual.addmm_(x, weight.T)
        if bias is not None:
            residual += bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, pdl=self._pdl)

    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if x.shape[0] == 1:
            return self._one_token(x, weight, Fusion(norm_weight, eps, bias))
        return F.linear(self.rms_norm(x, norm_weight, eps), weight, bias)

    def logits(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, head: torch.Tensor) -> torch.Tensor:
        normed = self.rms_norm(x, norm_weight, eps)
        if x.is_cuda and head.dtype is not torch.float32:
            return torch.mm(normed, head.T, out_dtype=torch.float32)
        return F.linear(normed, head).float()

    def norm_gate_up(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
    ) -> torch.Tensor:
        if x.shape[0] == 1:
            out = x.new_empty(1, gate_up_weight.shape[0] // 2)
            fusion = Fusion(norm_weight, eps, gated=True)
            one_token_linear(x, gate_up_weight, out, fusion, pdl=self._pdl)
            return out
        gate_up = F.linear(self.rms_norm(x, norm_weight, eps), gate_up_weight)
        return silu_and_mul(gate_up, pdl=self._pdl)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up, pdl=self._pdl)

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        num_q_heads: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        return rope_and_store(qkv, cos_sin, kv_layer, batch, num_q_heads, q_norm, k_norm, eps, pdl=self._pdl)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_plain = not window and sinks is None
        is_long = batch.max_query_len >= LONG_RUN and q.dtype is torch.bfloat16 and q.shape[2] % 8 == 0
        if is_plain and is_long and self._has_cudnn:
            return self._long_attention(q, kv_layer, batch, scale)
        out = torch.empty_like(q)
        if batch.max_query_len > 1:
            paged_prefill(q, kv_layer, batch, scale, out, _NO_LIMIT, window=window, sinks=sinks)
        if batch.max_query_len == 1 or batch.context_lens.shape[0] > 1:
            paged_decode(q, kv_layer, batch, scale, out, window=window, sinks=sinks, pdl=self._pdl)
        return out

    def moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
    ) -> torch.Tensor:
        return experts_mlp(x, expert_ids, expert_weights.contiguous(), gate_up_weights, down_weights)

    def _work(self, x: torch.Tensor) -> Workspace:
        if self._workspace is None:
            self._workspace = Workspace(x.device)
        return self._workspace

    def _one_token(self, x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
        out = x.new_empty(1, weight.shape[0])
        one_token_linear(x, weight, out, fusion, pdl=self._pdl)
        return out

    def _long_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Long runs one by one, all others together."""
        long = [run for run in batch.runs if run.length >= LONG_RUN]
        if len(long) == 1 and long[0].length == q.shape[0]:
            return long_attention(q, kv_layer, batch.page_table[long[0].sequence], long[0].context, scale)
        out = torch.empty_like(q)
        for run in long:
            rows = slice(run.begin, run.begin + run.length)
            out[rows] = long_attention(q[rows], kv_layer, batch.page_table[run.sequence], run.context, scale)
        if len(long) < batch.context_lens.shape[0]:
            paged_prefill(q, kv_layer, batch, scale, out, LONG_RUN - 1)
            paged_decode(q, kv_layer, batch, scale, out, pdl=self._pdl)
        return out
