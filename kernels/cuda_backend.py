"""The backend for CUDA devices: Triton kernels beside cuBLAS matrix products."""

import torch
import torch.nn.functional as F

from kernels.interface import AttentionBatch, KernelBackend
from kernels.reference import ReferenceBackend
from kernels.triton_kernels.paged_decode import paged_decode
from kernels.triton_kernels.paged_prefill import paged_prefill
from kernels.triton_kernels.rms_norm import rms_norm
from kernels.triton_kernels.rope_and_store import rope_and_store
from kernels.triton_kernels.silu_and_mul import silu_and_mul


class CudaBackend(KernelBackend):
    """Runs the contract with Triton; bfloat16 and float32. float32 products never use tf32 (torch's default).

    Windows and sinks are plain torch, one sequence after the other.
    """

    def __init__(self) -> None:
        self._plain = ReferenceBackend()

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def linear_residual(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        residual.addmm_(x, weight.T)
        if bias is not None:
            residual += bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return F.linear(rms_norm(x, norm_weight, eps), weight, bias)

    def norm_gate_up(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
    ) -> torch.Tensor:
        return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), gate_up_weight))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up)

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
        return rope_and_store(qkv, cos_sin, kv_layer, batch, num_q_heads, q_norm, k_norm, eps)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if window or sinks is not None:
            return self._plain.paged_attention(q, kv_layer, batch, scale, window, sinks)
        out = torch.empty_like(q)
        if batch.max_query_len > 1:
            paged_prefill(q, kv_layer, batch, scale, out)
        if batch.max_query_len == 1 or batch.context_lens.shape[0] > 1:
            paged_decode(q, kv_layer, batch, scale, out)
        return out

    def moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in expert_ids.unique().tolist():
            tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
            hidden = silu_and_mul(F.linear(x[tokens], gate_up_weights[expert]))
            gain = expert_weights[tokens, choices, None].float()
            out.index_add_(0, tokens, F.linear(hidden, down_weights[expert]).float() * gain)
        return out.to(x.dtype)
