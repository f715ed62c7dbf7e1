"""What a plan makes a worker compute."""

from dataclasses import dataclass

import numpy as np
import torch

from models.forward import ForwardBatch


@dataclass(frozen=True)
class PromptSpan:
    """Prompt tokens whose log-probabilities a chunk gives.

    targets: int64 [n], the tokens to score, in order. first_logit: logits row first_logit + i scores `targets[i]`.
    """

    row: int
    targets: np.ndarray
    first_logit: int


@dataclass(frozen=True)
class StepInputs:
    """One step's forward batch and what is done with its logits.

    rows: int64 [B], batch rows in packed order. The first S logits rows sample, the rest belong to `prompt_spans`.
    sample_rows: int64 [S], batch rows in the order of their logits; sample_index is the same on the device.
    sample_positions: int64 [S], positions of the tokens about to be sampled. num_tokens: tokens computed.
    """

    forward: ForwardBatch
    rows: np.ndarray
    sample_rows: np.ndarray
    sample_index: torch.Tensor
    sample_positions: np.ndarray
    prompt_spans: list[PromptSpan]
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token and samples, so that logits rows are packed rows in order."""
        return len(self.sample_rows) == self.num_tokens and not self.prompt_spans

    @property
    def is_tail(self) -> bool:
        """Whether one sequence computes several tokens up to its next one, and nothing else is wanted."""
        return len(self.rows) == 1 == len(self.sample_rows) and self.num_tokens > 1 and not self.prompt_spans
