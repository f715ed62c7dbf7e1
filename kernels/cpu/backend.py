"""The CPU backend: float32 and bfloat16 models on native threads of its own."""

import torch

from kernels.cpu.attention_op import AttentionOps, check_attention
from kernels.cpu.jit import InstructionSet
from kernels.cpu.linear import Epilogue, lanes_groups
from kernels.cpu.linear_op import LinearOp
from kernels.cpu.memory import empty_huge
from kernels.cpu.moe_op import moe_mlp
from kernels.cpu.norm_op import NormOps
from kernels.cpu.runtime import Runtime
from kernels.cpu.warmup import compile_all
from kernels.interface import AttentionBatch, KernelBackend, KernelShapes, Progress


class CpuBackend(KernelBackend):
    """Kernels written as LLVM IR and compiled for this CPU on first use, a few milliseconds each.

    num_threads: threads of every operation, the calling one included (default: torch's); 1 starts none.
    instruction_set: at most this is used (default: the best the CPU has); a test of lower ones.
    max_own_tokens: linear layers of larger batches go to oneDNN or MKL (default: what was measured to be faster).
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        instruction_set: InstructionSet | None = None,
        max_own_tokens: int | None = None,
    ) -> None:
        self._runtime = Runtime(num_threads if num_threads is not None else torch.get_num_threads(), instruction_set)
        self._norms = NormOps(self._runtime)
        self._linear, self._residual, self._gate_up, self._logits = (
            LinearOp(self._runtime, self._norms, epilogue, max_own_tokens)
            for epilogue in (Epilogue.STORE, Epilogue.RESIDUAL, Epilogue.GATE_UP, Epilogue.LOGITS)
        )
        self._attention = AttentionOps(self._runtime)

    @property
    def num_threads(self) -> int:
        return self._runtime.num_threads

    @property
    def instruction_set(self) -> InstructionSet:
        return self._runtime.target.instruction_set

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return empty_huge(shape, dtype)

    def check_model(self, dtype: torch.dtype, shapes: KernelShapes, page_size: int) -> None:
        super().check_model(dtype, shapes, page_size)
        for head_dim in shapes.head_dims:
            check_attention(head_dim, page_size, shapes.heads_per_kv)

    def warmup(self, dtype: torch.dtype, shapes: KernelShapes, progress: Progress | None = None) -> None:
        linears = (self._linear, self._residual, self._gate_up, self._logits)
        max_groups = lanes_groups(self._runtime.target, 3 * self._runtime.target.lanes)
        compile_all(linears, self._attention, self._norms, max_groups, dtype, shapes, progress)

    def close(self) -> None:
        """End the worker threads. Optional: the interpreter's exit does it too."""
        self._runtime.close()

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids).float()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
        self._linear.run(x, weight, out, bias)
        return out

    def linear_residual(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._residual.run(x, weight, residual, bias)

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
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
        self._linear.run(x, weight, out, bias, norm_weight, eps)
        return out

    def logits(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, head: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], head.shape[0]), dtype=torch.float32)
        self._logits.run(x, head, out, None, norm_weight, eps)
        return out

    def norm_gate_up(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty((x.shape[0], gate_up_weight.shape[0] // 2), dtype=gate_up_weight.dtype)
        self._gate_up.run(x, gate_up_weight, out, None, norm_weight, eps)
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
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention.paged_attention(q, kv_layer, batch, scale, window, sinks)

    def moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
    ) -> torch.Tensor:
        return moe_mlp(self._gate_up, self._linear, x, expert_ids, expert_weights, gate_up_weights, down_weights)
