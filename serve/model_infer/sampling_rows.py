"""Sampling parameters of every batch row, as arrays that a step takes its rows from."""

import numpy as np

from serve.model_infer.penalties import LogitEdits, needs_edits
from serve.model_infer.row_draw import DrawRules
from serve.types import SamplingParams

# Below this a temperature means greedy: dividing by it would overflow, and vLLM draws the line here as well.
MIN_TEMPERATURE = 1e-5
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class SamplingRows:
    """One entry a batch row. Only `Sampler` writes it.

    rules: what a row that draws does, the same as the arrays say; None for a greedy row.
    """

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.seed = np.zeros(max_rows, dtype=np.uint64)
        self.is_truncated = np.zeros(max_rows, dtype=bool)
        self.rules: list[DrawRules | None] = [None] * max_rows
        self.edits: dict[int, LogitEdits] = {}
        self.num_logprobs: dict[int, int] = {}
        self.unusable: dict[int, str] = {}

    def add(
        self, row: int, params: SamplingParams, prompt: np.ndarray, output: np.ndarray, end_ids: list[int], vocab: int
    ) -> None:
        """Set a row that has no entry. Raises ParameterError; the row then counts as greedy."""
        if needs_edits(params):
            self.edits[row] = LogitEdits(params, prompt, output, end_ids, vocab)
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        self._set(row, params)

    def remove(self, row: int) -> None:
        """Forget the row."""
        self._set(row, _GREEDY)
        self.edits.pop(row, None)
        self.num_logprobs.pop(row, None)
        self.unusable.pop(row, None)

    def _set(self, row: int, params: SamplingParams) -> None:
        is_greedy = params.temperature < MIN_TEMPERATURE
        self.temperature[row] = 0.0 if is_greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed % 2**64
        rules = DrawRules(params.temperature, params.top_k, params.top_p, params.min_p)
        self.is_truncated[row] = rules.truncates
        self.rules[row] = None if is_greedy else rules
