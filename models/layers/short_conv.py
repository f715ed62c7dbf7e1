"""Gated short convolution (LFM2): mixes the last few tokens of each channel."""

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layers.layer_views import LayerLeaves
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.state_layout import split_range
from models.weight_plan import WeightPlan

GROUP = "recurrent"


def plan_short_conv(plan: WeightPlan, layer: int, config: ModelConfig, sharding: Sharding) -> None:
    """Channels of this rank: rows of both gates and of the values, taps, and columns of the output."""
    hidden, prefix = config.hidden_size, f"model.layers.{layer}"
    width = hidden // config.num_q_heads
    start, stop = (part * width for part in split_range(config.num_q_heads, sharding.size, sharding.rank))
    name = f"{prefix}.conv.in_proj.weight"
    rows = [(name, 3 * hidden, part * hidden + start, part * hidden + stop) for part in range(3)]
    plan.add_whole(f"{layer}.attn_norm", f"{prefix}.input_layernorm.weight", (hidden,))
    plan.add_rows(f"{layer}.in", rows, (hidden,))
    plan.add_rows(f"{layer}.conv", [(f"{prefix}.conv.conv.weight", hidden, start, stop)], (1, config.conv_kernel))
    plan.add_columns(f"{layer}.o", f"{prefix}.conv.out_proj.weight", (hidden, hidden), start, stop)


class ShortConv:
    """x += out(c * conv(b * v)) with b, c, v made of norm(x). Leaf: `conv`, of the group of checkpoints."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        self.norm = weights[f"{layer}.attn_norm"]
        self.project = weights[f"{layer}.in"]
        self.conv = weights[f"{layer}.conv"][:, 0]
        self.o = weights[f"{layer}.o"]
        self.eps = config.rms_norm_eps
        self.tp = tp
        self.backend = backend

    def forward(self, x: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> None:
        """x [T, H] in place."""
        backend, step, pages = self.backend, batch.attention[GROUP], batch.state_pages[GROUP]
        b, c, values = backend.norm_linear(x, self.norm, self.eps, self.project).chunk(3, dim=1)
        mixed = backend.causal_conv(b * values, self.conv, (leaves["conv"],), pages, step, has_silu=False)
        x += self.tp.all_reduce(backend.linear(c * mixed, self.o))
