"""The oracle: every operation of `kernels.interface` in plain torch, on any device and in any float dtype.

Written to be read and trusted, not to be fast. Arithmetic runs in float32 (float64 where the input is float64, which
is how the tests get an exact answer) and each method rounds its result once to the dtype of its input.
"""

import torch
import torch.nn.functional as F

from kernels.interface import AttentionBatch, KernelBackend


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that arithmetic runs in."""
    return x if x.dtype == torch.float64 else x.float()


class ReferenceBackend(KernelBackend):
    """Plain torch implementation of the contract; loops over sequences and experts where that is clearest."""

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table[token_ids]

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide = _wide(x)
        out = wide @ weight.to(wide.dtype).T
        if bias is not None:
            out = out + bias.to(wide.dtype)
        return out.to(x.dtype)

    def linear_residual(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        residual += self.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.to(wide.dtype)).to(weight.dtype)

    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.linear(self.rms_norm(x, norm_weight, eps), weight, bias)

    def norm_gate_up(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
    ) -> torch.Tensor:
        return self.silu_and_mul(self.norm_linear(x, norm_weight, eps, gate_up_weight))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

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
        num_kv_heads, head_dim = kv_layer.shape[1], kv_layer.shape[4]
        heads = qkv.view(-1, num_q_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)  # [T, heads, D]
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        rows = cos_sin[batch.positions]
        q, k = self._rotate(q, rows), self._rotate(k, rows)
        slots = batch.positions // batch.page_size
        pages = batch.page_table[batch.sequence_ids.long(), slots].long()
        offsets = batch.positions % batch.page_size
        kv_layer[pages, :, 0, offsets] = k
        kv_layer[pages, :, 1, offsets] = v
        return q

    def _rotate(self, x: torch.Tensor, cos_sin_rows: torch.Tensor) -> torch.Tensor:
        """Half-split rotation (Su et al. 2021, in llama's order) of x [T, heads, D] by rows [T, 2R]; fresh tensor."""
        wide = _wide(x)
        cos, sin = cos_sin_rows.to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R]
        half = cos.shape[-1]
        first, second, rest = wide.split([half, half, wide.shape[-1] - 2 * half], dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for index, context_len in enumerate(contexts):
            rows = slice(starts[index], starts[index + 1])
            positions = batch.positions[rows]
            first = max(0, int(positions[0]) + 1 - window) // batch.page_size if window else 0
            num_pages = -(-context_len // batch.page_size)
            pages = kv_layer[batch.page_table[index, first:num_pages].long()]  # [pages, Hkv, 2, P, D]
            count = context_len - first * batch.page_size
            keys, values = pages.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :count]  # [Hkv, count, D] each
            out[rows] = self._attend(q[rows], keys, values, positions - first * batch.page_size, scale, window, sinks)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        window: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One sequence: q [t, Hq, D] at `positions` over keys and values [Hkv, context, D] -> [t, Hq, D]."""
        wide = _wide(q)
        group = q.shape[1] // keys.shape[0]
        keys, values = (x.to(wide.dtype).repeat_interleave(group, dim=0) for x in (keys, values))
        scores = torch.einsum("thd,hsd->hts", wide, keys) * scale
        places = torch.arange(keys.shape[1], device=q.device)
        hidden = places > positions[:, None]  # [t, context]
        if window:
            hidden |= places <= positions[:, None] - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(wide.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
            weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        return torch.einsum("hts,hsd->thd", weights, values).to(q.dtype)

    def moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=_wide(x).dtype)
        for expert in expert_ids.unique().tolist():
            tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
            hidden = self.silu_and_mul(self.linear(x[tokens], gate_up_weights[expert]))
            share = self.linear(hidden, down_weights[expert]).to(out.dtype)
            out[tokens] += share * expert_weights[tokens, choices, None].to(out.dtype)
        return out.to(x.dtype)
