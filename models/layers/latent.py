"""Multi-head latent attention (DeepSeek-V2, section 2.1): one latent and one rotated key a token, for all heads."""

import math

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig, RopeConfig
from models.forward import ForwardBatch
from models.layers.layer_views import LayerLeaves
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan

GROUP = "full"
_LATENT_NORM_EPS = 1e-6  # of the norms within the attention, whatever the config says of the others


def plan_latent(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """Projections of query heads by rank; what makes the latent is whole on every rank.

    `a` stacks what reads the stream: latent and rotated key, then the queries or what they are projected from.
    """
    mla, heads, hidden = config.mla, sharding.heads, config.hidden_size
    prefix = f"model.layers.{layer}.self_attn"

    def rows(dim: int) -> tuple[int, int, int]:
        return config.num_q_heads * dim, heads.q_start * dim, heads.q_end * dim

    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    query_rows = rows(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    first = [(f"{prefix}.kv_a_proj_with_mqa.weight", latent, 0, latent)]
    if mla.q_lora_rank is None:
        first.append((f"{prefix}.q_proj.weight", *query_rows))
    else:
        first.append((f"{prefix}.q_a_proj.weight", mla.q_lora_rank, 0, mla.q_lora_rank))
        plan.add_whole(f"{layer}.q_a_norm", f"{prefix}.q_a_layernorm.weight", (mla.q_lora_rank,))
        plan.add_rows(f"{layer}.q_b", [(f"{prefix}.q_b_proj.weight", *query_rows)], (mla.q_lora_rank,))
    plan.add_whole(f"{layer}.attn_norm", f"model.layers.{layer}.input_layernorm.weight", (hidden,))
    plan.add_rows(f"{layer}.a", first, (hidden,))
    plan.add_whole(f"{layer}.latent_norm", f"{prefix}.kv_a_layernorm.weight", (mla.kv_lora_rank,))
    kv_rows = rows(mla.qk_nope_head_dim + mla.v_head_dim)
    plan.add_rows(f"{layer}.kv_b", [(f"{prefix}.kv_b_proj.weight", *kv_rows)], (mla.kv_lora_rank,))
    total, start, stop = rows(mla.v_head_dim)
    plan.add_columns(f"{layer}.o", f"{prefix}.o_proj.weight", (hidden, total), start, stop)


class LatentAttention:
    """x += attention(norm(x)); the leaf `latent` gets [normalised latent | rotated key] of every new token."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
        cos_sin: torch.Tensor,
    ) -> None:
        self.mla = mla = config.mla
        self.num_heads = sharding.heads.num_q_heads
        self.norm = weights[f"{layer}.attn_norm"]
        self.a = weights[f"{layer}.a"]
        self.latent_norm = weights[f"{layer}.latent_norm"]
        self.q_a_norm = weights.get(f"{layer}.q_a_norm")
        self.q_b = weights.get(f"{layer}.q_b")
        self.kv_b = weights[f"{layer}.kv_b"].view(self.num_heads, -1, mla.kv_lora_rank)
        self.o = weights[f"{layer}.o"]
        self.eps = config.rms_norm_eps
        self.scale = softmax_scale(mla.qk_nope_head_dim + mla.qk_rope_head_dim, config.rope)
        self.cos_sin = cos_sin
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> None:
        """x [T, H] in place."""
        backend, attention, latent = self.backend, batch.attention[GROUP], leaves["latent"]
        rank, rotary = self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        made = backend.norm_linear(x, self.norm, self.eps, self.a)
        cos_sin = self.cos_sin[attention.positions]
        key = self._rotate(made[:, None, rank : rank + rotary], cos_sin)[:, 0]
        normed = backend.rms_norm(made[:, :rank].contiguous(), self.latent_norm, _LATENT_NORM_EPS)
        backend.store_rows(latent, attention.positions, torch.cat((normed, key), dim=1), attention)
        q = made[:, rank + rotary :].contiguous()
        if self.q_b is not None:
            q = backend.norm_linear(q, self.q_a_norm, _LATENT_NORM_EPS, self.q_b)
        q = self._rotate(q.view(len(x), self.num_heads, -1), cos_sin)
        out = backend.latent_attention(q, latent, self.kv_b, attention, self.scale).flatten(1)
        if self.tp.size == 1:
            backend.linear_residual(out, self.o, x)
        else:
            x += self.tp.all_reduce(backend.linear(out, self.o))

    def _rotate(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """The last dimensions of x [T, heads, D]; queries and keys alike, so any order of pairs will do."""
        if self.mla.is_interleaved:
            return self.backend.rotate_tail(x, cos_sin)
        return self.backend.rotate_tail_halves(x, cos_sin)


def softmax_scale(head_dim: int, rope: RopeConfig) -> float:
    """head_dim ** -0.5, times the square of YaRN's scale of all dimensions where the checkpoint asks for it."""
    scale = float(head_dim**-0.5)
    if rope.rope_type != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
