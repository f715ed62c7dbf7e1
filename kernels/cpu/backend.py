"""The CPU backend: float32 and bfloat16 models on native threads of its own."""

import torch

from kernels.cpu.attention_op import AttentionOps
from kernels.cpu.jit import InstructionSet
from kernels.cpu.linear import Epilogue
from kernels.cpu.linear_op import LinearOps
from kernels.cpu.moe_op import moe_mlp
from kernels.cpu.norm_op import NormOps
from kernels.cpu.runtime import Runtime
from kernels.interface import AttentionBatch, KernelBackend


class CpuBackend(KernelBackend):
    """Kernels written as LLVM IR and compiled for this CPU on first use, a few milliseconds each.

    num_threads: threads of every operation, the calling one included (default: torch's); 1 starts none.
    instruction_set: at most this is used (default: the best the CPU has); a test of lower ones.
    max_streaming_tokens: batches up to this run on the kernels here, larger ones on oneDNN.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        instruction_set: InstructionSet | None = None,
        max_streaming_tokens: int = 64,
    ) -> None:
        self._runtime = Runtime(num_threads if num_threads is not None else torch.get_num_threads(), instruction_set)
        self._norms = NormOps(self._runtime)
        self._linears = LinearOps(self._runtime, self._norms, max_streaming_tokens)
        self._attention = AttentionOps(self._runtime)

    @property
    def num_threads(self) -> int:
        return self._runtime.num_threads

    @property
    def instruction_set(self) -> InstructionSet:
        return self._runtime.target.instruction_set

    def close(self) -> None:
        """End the worker threads. Optional: the interpreter's exit does it too."""
        self._runtime.close()

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty((x.shape[0], weight.shape[0]))
        self._linears.run(x, weight, out, Epilogue.STORE, bias)
        return out

    def linear_residual(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._linears.run(x, weight, residual, Epilogue.RESIDUAL, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norms.rms_norm(x, weight, eps)

    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = x.new_empty((x.shape[0], weight.shape[0]))
        self._linears.run(x, weight, out, Epilogue.STORE, bias, norm_weight, eps)
        return out

    def norm_gate_up(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
    ) -> torch.Tensor:
        out = x.new_empty((x.shape[0], gate_up_weight.shape[0] // 2))
        self._linears.run(x, gate_up_weight, out, Epilogue.GATE_UP, None, norm_weight, eps)
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._norms.silu_and_mul(gate_up, out)
        return out

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
        return self._attention.rope_and_store(qkv, cos_sin, kv_layer, batch, num_q_heads, q_norm, k_norm, eps)

    def paged_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        return self._attention.paged_attention(q, kv_layer, batch, scale)

    def moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
    ) -> torch.Tensor:
        return moe_mlp(self._linears, x, expert_ids, expert_weights, gate_up_weights, down_weights)
