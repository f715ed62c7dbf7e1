"""What all decoders share at both ends of their layers: embedding, final norm and head."""

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan


def plan_ends(plan: WeightPlan, config: ModelConfig, sharding: Sharding) -> None:
    """Embedding, final norm and head. A tied head is a view of the embedding, which every rank has whole."""
    plan.add_whole("embedding", "model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    plan.add_whole("norm", "model.norm.weight", (config.hidden_size,), offset=config.norm_offset)
    if not config.tie_word_embeddings:
        plan.add_rows("head", [("lm_head.weight", config.vocab_size, *sharding.vocab)], (config.hidden_size,))


class DecoderEnds:
    """One rank's part of what `plan_ends` asked for; a decoder puts its layers between."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
        table_bytes: int,
    ) -> None:
        """table_bytes: of the tables beside the weights."""
        self.config = config
        self.sharding = sharding
        self.tp = tp
        self.backend = backend
        self.embedding = weights["embedding"]
        self.norm = weights["norm"]
        head = weights.get("head")
        self.head = self.embedding[slice(*sharding.vocab)] if head is None else head
        self.weight_bytes = sum(weight.nbytes for weight in weights.values()) + table_bytes

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab] of stream rows [R, H], the same on every rank."""
        logits = self.backend.logits(rows, self.norm, self.config.rms_norm_eps, self.head)
        if self.tp.size > 1:
            logits = self.tp.all_gather_columns(logits, self.sharding.vocab_widths)
        return logits
