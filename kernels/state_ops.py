"""Operations on states other than paged keys and values of every token; part of every kernel backend.

They are plain torch (`kernels.torch_ops`), which is their oracle, until a backend brings a kernel of its own. Shapes
as in `kernels.interface`; `pages` are those of the group's pool. A *leaf* is a view of one layer, strided. None of
them loops over the sequences of a step that only decodes.
"""

from typing import TYPE_CHECKING

import torch

from kernels.torch_ops import causal_conv as conv
from kernels.torch_ops import compressor, delta_rule, experts, latent_attention, paging, rotary, sparse_attention

if TYPE_CHECKING:
    from kernels.interface import AttentionBatch


class StateOps:
    """Latent attention, gated delta rule, causal convolution, compressed attention."""

    def store_rows(self, leaf: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, batch: "AttentionBatch") -> None:
        """Row rows[t] of token t's sequence in leaf [pages, rows a page, D] becomes values[t]; rows int64 [T]."""
        paging.store_rows(leaf, rows, values, batch)

    def rotate_tail(self, x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotate the last 2R dimensions of x [T, heads, D] by neighbouring pairs; cos_sin float32 [T, 2R] of the tokens
        (R cosines, then R sines). inverse: by the negative angles. Fresh tensor of x's dtype."""
        return rotary.rotate_tail(x, cos_sin, inverse=inverse)

    def rotate_tail_halves(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """The same with pairs (i, i + R) of those dimensions, as llama has them."""
        return rotary.rotate_tail_halves(x, cos_sin)

    def latent_attention(
        self, q: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, batch: "AttentionBatch", scale: float
    ) -> torch.Tensor:
        """Multi-head latent attention (DeepSeek-V2), causal, over what the leaf holds, new tokens included.

        q [T, Hq, N + R], its last R dimensions rotated. latent [pages, P, C + R]: normalised latent, then the rotated
        key that all heads share. kv_b [Hq, N + V, C] makes keys and values of a latent. -> [T, Hq, V].
        """
        return latent_attention.latent_attention(q, latent, kv_b, batch, scale)

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        state_pages: torch.Tensor,
        batch: "AttentionBatch",
        has_silu: bool = True,
    ) -> torch.Tensor:
        """A depthwise causal convolution, or silu of it; x [T, C], weight [C, K] -> [T, C].

        states: leaves [pages, heads, C_i, K - 1] whose channels in order are the C of x: each sequence's last inputs,
        oldest first; read and then written at state_pages int64 [B].
        """
        return conv.causal_conv(x, weight, states, state_pages, batch, has_silu)

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        rate: torch.Tensor,
        state: torch.Tensor,
        state_pages: torch.Tensor,
        batch: "AttentionBatch",
    ) -> torch.Tensor:
        """Linear attention by the gated delta rule, in float32 -> [T, Hv, Dv].

        q, k [T, Hk, Dk] are made unit vectors here (epsilon 1e-6) and q divided by sqrt(Dk); head h of v [T, Hv, Dv]
        uses head h // (Hv / Hk) of them. log_decay, rate [T, Hv]. state: leaf float32 [pages, Hk, Hv / Hk, Dk, Dv],
        read and written at state_pages.
        """
        return delta_rule.gated_delta_rule(q, k, v, log_decay, rate, state, state_pages, batch)

    def compress(
        self,
        values: torch.Tensor,
        gates: torch.Tensor,
        ratio: int,
        state: torch.Tensor,
        ahead: torch.Tensor | None,
        state_pages: torch.Tensor,
        batch: "AttentionBatch",
    ) -> torch.Tensor:
        """The entry of each token's window, one every `ratio` tokens: softmax-gated mean of the window's values by
        channel -> float32 [T, D]. Until the window's last token it lacks what follows; that of an inner token is
        undefined in a prompt but for being an entry of that window.

        values, gates [T, D], or with overlap [T, 2D]: the first half counts in the window that follows. state, ahead
        (overlap only): leaves float32 [pages, 3, D] of the unfinished window and of the one after; zero means empty.
        """
        return compressor.compress(values, gates, ratio, state, ahead, state_pages, batch)

    def limited_moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        """`moe_mlp` of `kernels.interface` with gates of at most limit, and the other half within [-limit, limit]."""
        return experts.limited_moe_mlp(x, expert_ids, expert_weights, gate_up_weights, down_weights, limit)

    def biased_moe_mlp(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up_weights: torch.Tensor,
        gate_up_bias: torch.Tensor,
        down_weights: torch.Tensor,
        down_bias: torch.Tensor | None,
        slope: float,
        limit: float,
    ) -> torch.Tensor:
        """Experts of gpt-oss: sum over k of expert_weights[t, k] * (down_e((up + 1) * gate * sigmoid(slope * gate))).

        Gates are at most limit, the other half lies within [-limit, limit]. gate_up_weights [E, H, 2I] and its bias
        [E, 2I] have gate and up of a channel next to each other; down_weights [E, I, H], down_bias [E, H] -> [T, H].
        """
        return experts.biased_moe_mlp(
            x,
            expert_ids,
            expert_weights,
            gate_up_weights,
            gate_up_bias,
            down_weights,
            down_bias,
            slope,
            limit,
        )

    def select_entries(
        self,
        q: torch.Tensor,
        head_weights: torch.Tensor,
        keys: torch.Tensor,
        batch: "AttentionBatch",
        ratio: int,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` finished entries e that sum_h head_weights[t, h] * relu(q[t, h] . keys[e]) puts first, earlier
        ones before equal ones. q [T, H, D], keys leaf [pages, P / ratio, D] -> int64 [T, K], and which are real
        (bool [T, K]); K = min(count, entries of the longest context)."""
        return sparse_attention.select_entries(q, head_weights, keys, batch, ratio, count)

    def window_attention(
        self,
        q: torch.Tensor,
        window: torch.Tensor,
        batch: "AttentionBatch",
        window_tokens: int,
        sinks: torch.Tensor,
        scale: float,
        entries: torch.Tensor | None = None,
        entry_batch: "AttentionBatch | None" = None,
        chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
        ratio: int = 1,
    ) -> torch.Tensor:
        """Attention of q [T, H, D] to the last window_tokens rows, its own included, of window [pages, P, D] by `batch`
        and to finished entries [pages, P / ratio, D] by `entry_batch`: those `chosen`, or all. Rows are keys and values
        at once; sinks [H] are logits without a value. -> [T, H, D]."""
        return sparse_attention.window_attention(
            q, window, batch, window_tokens, sinks, scale, entries, entry_batch, chosen, ratio
        )
