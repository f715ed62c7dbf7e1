"""The operations that a model is written in: one contract, several backends.

Models call these through `kernels.dispatch.get_backend(device)` and never choose a kernel themselves. Shapes use
T tokens in the step (all sequences packed, no padding), B sequences, H hidden size, Hq query heads, Hkv key/value
heads, D head dimension, P page size. The "model dtype" is bfloat16 or float32 on the CPU.

A caller may pass any T >= 1; a backend may choose a kernel by T only among kernels that read bit-equal weights.
Outputs are fresh tensors unless a method says that it writes in place.

The residual stream (what `embedding` gives, `norm_*` and `logits` read and `linear_residual` adds to) has a dtype that
the backend chooses, at least as wide as the model's. The CPU keeps it in float32: rounding it to bfloat16 at each of a
deep model's additions costs more accuracy than all other roundings together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.state_ops import StateOps


@dataclass(frozen=True)
class Run:
    """Several new tokens of one sequence: packed tokens [begin, begin + length), the last of `context` tokens."""

    sequence: int
    begin: int
    length: int
    context: int


@dataclass(frozen=True)
class AttentionBatch:
    """Where each packed token belongs and where its sequence's pages are; the same for every layer of a step.

    query_starts:   int32 [B + 1]; sequence b owns packed tokens [query_starts[b], query_starts[b + 1]).
    context_lens:   int32 [B]; tokens of sequence b in the cache after this step, its own new ones included. So the
                    first new token of b has position context_lens[b] - (query_starts[b+1] - query_starts[b]).
    page_table:     int32 [B, max_pages]; device page ids of sequence b in order; entries past its pages are undefined.
    positions:      int64 [T]; absolute position of each packed token.
    sequence_ids:   int32 [T]; which sequence each packed token belongs to.
    max_query_len:  longest new-token run in the batch (1 means that every sequence decodes).
    max_context_len: longest context in the batch.
    page_size:      tokens a page.
    runs:           the sequences of several new tokens, on the host; all of them, or none in a batch where
                    max_query_len is 1.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor
    positions: torch.Tensor
    sequence_ids: torch.Tensor
    max_query_len: int
    max_context_len: int
    page_size: int
    runs: tuple[Run, ...] = ()


Progress = Callable[[int, int], None]  # (kernels done, kernels in all)


class UnsupportedModelError(ValueError):
    """A backend has no kernels for a model; one line that says why."""


@dataclass(frozen=True)
class KernelShapes:
    """Shapes of one rank's model that kernels are compiled for: input sizes K of each kind of linear layer, and D.

    heads_per_kv: query heads that read one kv head.
    """

    linear_inputs: tuple[int, ...] = ()  # of linear and norm_linear
    residual_inputs: tuple[int, ...] = ()
    gate_up_inputs: tuple[int, ...] = ()
    logits_inputs: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    heads_per_kv: int = 1


class KernelBackend(StateOps, ABC):
    """What every backend implements. All methods are called from one thread of one worker process, but for `warmup`."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for weights, which are read in every step: not initialised."""
        return torch.empty(shape, dtype=dtype, device=device)

    def check_model(self, dtype: torch.dtype, shapes: KernelShapes, page_size: int) -> None:
        """Raises UnsupportedModelError for what steps of a model would raise in the middle of their work."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(f"there are kernels for float32 and bfloat16, not for {dtype}")

    def warmup(self, dtype: torch.dtype, shapes: KernelShapes, progress: Progress | None = None) -> None:
        """Compile all that steps of these shapes need, if this can be done without running them. May run on another
        thread, beside the loading of weights; `progress` is called from that thread."""
        if progress is not None:
            progress(0, 0)

    @abstractmethod
    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of `table` [V, H] for `token_ids` int64 [T] -> the residual stream [T, H]."""

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], accumulated in float32."""

    @abstractmethod
    def linear_residual(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """residual [T, N] += x [T, K] @ weight [N, K]^T + bias, in place."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension of x [..., H] (the stream, or the model dtype), statistics in float32 (Zhang
        and Sennrich 2019) -> [..., H] of weight's dtype."""

    @abstractmethod
    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """linear(rms_norm(x, norm_weight, eps), weight, bias); the stream x [T, H] is left as it is -> [T, N]."""

    def logits(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, head: torch.Tensor) -> torch.Tensor:
        """norm_linear(x, norm_weight, eps, head) in float32: stream rows x [R, H], head [V, H] -> [R, V]."""
        return self.norm_linear(x, norm_weight, eps, head).float()

    @abstractmethod
    def norm_gate_up(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
    ) -> torch.Tensor:
        """SwiGLU's first half: g, u = split(linear(rms_norm(x), gate_up_weight [2I, H])); silu(g) * u -> [T, I]."""

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate_up[:, :I]) * gate_up[:, I:] for gate_up [T, 2I] -> [T, I]."""

    @abstractmethod
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
        """Normalise (optional, per head), rotate and store one layer's new keys and values; return the rotated queries.

        qkv [T, (Hq + 2 Hkv) * D], order q heads, k heads, v heads. cos_sin float32 [max_positions, 2 * R]: cos of R
        half-dimensions, then sin (half-split rotation of the first 2R of D dimensions, as llama and qwen use it);
        any attention scaling of the rope type is already in it. kv_layer [num_pages, Hkv, 2, P, D] is a strided view of
        the page-major pool [page, kv_head, layer, k|v, token, dim] for this layer: index 0 of dim 2 is K, 1 is V.
        Token t goes to page page_table[sequence_ids[t], positions[t] // P], row positions[t] % P.
        q_norm, k_norm: RMSNorm weights [D] applied before the rotation (qwen3). Returns q [T, Hq, D].
        """

    @abstractmethod
    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of the packed queries q [T, Hq, D] over their sequences' pages, new tokens included
        (`rope_and_store` ran before). Query head h reads kv head h // (Hq / Hkv). Softmax in float32.
        kv_layer as in `rope_and_store`. window: keys that a query sees, its own among them (0: all); pages that lie
        whole below a step's windows are not read. sinks float32 [Hq]: a logit of each query head that takes its share
        of the softmax and has no value. -> [T, Hq, D]. No Python loop over sequences."""

    @abstractmethod
    def moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Mixture of SwiGLU experts: sum over k of expert_weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t).

        x [T, H] (already normalised), expert_ids int64 [T, K], expert_weights [T, K], gate_up_weights
        [E, 2I, H], down_weights [E, H, I] -> [T, H].
        """
