"""Compressed entries of a layer (DeepSeek-V4, section 2.3): one key and value for several tokens."""

from dataclasses import dataclass

import torch

from kernels.interface import KernelBackend
from models.forward import ForwardBatch
from models.weight_plan import WeightPlan

PAGED, CHECKPOINTS = "full", "tail"


@dataclass(frozen=True)
class CompressorSpec:
    """key: of its weights. width: of an entry. ratio: tokens an entry. has_overlap: an entry looks at the tokens of the
    one before too, in projections of their own. leaves: names of the entries' leaf and of the states'.
    """

    key: str
    width: int
    ratio: int
    has_overlap: bool
    entries: str
    state: str
    ahead: str | None

    @property
    def projected(self) -> int:
        """Columns of values, and of gates, that a token's projection has."""
        return self.width * (2 if self.has_overlap else 1)


def plan_compressor(plan: WeightPlan, spec: CompressorSpec, prefix: str) -> None:
    """Bias of the gates by place in the window (float32), and the norm; the projections are fused with others."""
    plan.add_whole(f"{spec.key}.bias", f"{prefix}.position_bias", (spec.ratio, spec.projected), torch.float32)
    plan.add_whole(f"{spec.key}.norm", f"{prefix}.kv_norm.weight", (spec.width,))


class Compressor:
    """Writes the entries of a step's tokens. An unfinished entry lies in its row already; no query looks at it."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        spec: CompressorSpec,
        eps: float,
        cos_sin: torch.Tensor,
        backend: KernelBackend,
    ) -> None:
        self.spec = spec
        self.bias = weights[f"{spec.key}.bias"]
        self.norm = weights[f"{spec.key}.norm"]
        self.eps = eps
        self.cos_sin = cos_sin
        self.backend = backend

    def forward(
        self, values: torch.Tensor, gates: torch.Tensor, leaves: dict[str, torch.Tensor], batch: ForwardBatch
    ) -> None:
        """values and gates [T, projected] of the step's tokens."""
        spec, backend, step = self.spec, self.backend, batch.attention[PAGED]
        gates = gates.float() + self.bias[step.positions % spec.ratio]
        ahead = leaves[spec.ahead] if spec.ahead is not None else None
        pages = batch.state_pages[CHECKPOINTS]
        entries = backend.compress(values, gates, spec.ratio, leaves[spec.state], ahead, pages, step)
        normed = backend.rms_norm(entries, self.norm, self.eps)
        windows = step.positions // spec.ratio
        rotated = backend.rotate_tail(normed[:, None], self.cos_sin[windows * spec.ratio])[:, 0]
        backend.store_rows(leaves[spec.entries], windows, rotated, step)
