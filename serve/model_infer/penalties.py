"""Changes to logits before sampling: logit bias, min_tokens, and the three penalties.

Definitions as in vLLM: the repetition penalty (Keskar et al. 2019) divides a positive and multiplies a negative logit
of every token of prompt or output; frequency subtracts per occurrence in the output, presence once. Only rows that
use one of these keep a record, and a record names only the tokens it has seen: the cost follows the text, not the
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from serve.types import SamplingParams


class ParameterError(Exception):
    """A request's sampling parameters do not fit the model; one line."""


def needs_edits(params: SamplingParams) -> bool:
    """Whether a row with these parameters changes its logits."""
    return bool(params.logit_bias) or params.min_tokens > 0 or has_penalties(params)


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class TokenCounts:
    """Tokens that a row has seen, and how often each is in its output.

    ids int64 [n], output_counts float32 [n]; both grow in place as tokens are sampled.
    """

    def __init__(self, prompt: np.ndarray, output: np.ndarray) -> None:
        ids, counts = np.unique(output, return_counts=True)
        rest = np.setdiff1d(prompt, ids)
        self._num = len(ids) + len(rest)
        self._ids = np.zeros(max(64, 2 * self._num), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: self._num] = np.concatenate([ids, rest])
        self._counts[: len(ids)] = counts
        self._index = {token: place for place, token in enumerate(self._ids[: self._num].tolist())}

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self._num]

    @property
    def output_counts(self) -> np.ndarray:
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._index.get(token_id)
        if place is None:
            place = self._num
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._index[token_id] = place
            self._num += 1
        self._counts[place] += 1.0


class LogitEdits:
    """What one row changes in its logits. Raises ParameterError for token ids outside of the vocabulary."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: np.ndarray,
        output: np.ndarray,
        end_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.num_prompt = len(prompt)
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        outside = (self.bias_ids < 0) | (self.bias_ids >= vocab_size)
        if outside.any():
            raise ParameterError(
                f"logit_bias: token id {self.bias_ids[outside][0]} is not in the vocabulary of {vocab_size}"
            )
        banned = {*end_ids, *params.stop_token_ids}
        self.banned_ids = np.array([token for token in sorted(banned) if 0 <= token < vocab_size], dtype=np.int64)
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            seen = prompt if params.repetition_penalty != 1.0 else prompt[:0]
            self.counts = TokenCounts(seen, output)

    def must_go_on(self, position: int) -> bool:
        """True while the token at `position` may not end the text (min_tokens)."""
        return position - self.num_prompt < self.params.min_tokens


def apply_edits(logits: torch.Tensor, edits: Sequence[tuple[int, int, LogitEdits]]) -> None:
    """Change logits float32 [R, V] in place; edits: (index of the logits row, position to sample, its edits)."""
    _add_bias(logits, [(index, edit) for index, _, edit in edits if len(edit.bias_ids)])
    _ban_ends(logits, [(index, edit) for index, position, edit in edits if edit.must_go_on(position)])
    _penalize(logits, [(index, edit, edit.counts) for index, _, edit in edits if edit.counts is not None])


def _add_bias(logits: torch.Tensor, edits: list[tuple[int, LogitEdits]]) -> None:
    if not edits:
        return
    flat, places = _places(logits, [(index, edit.bias_ids) for index, edit in edits])
    flat[places] += _on(logits, [edit.bias for _, edit in edits])


def _ban_ends(logits: torch.Tensor, edits: list[tuple[int, LogitEdits]]) -> None:
    if not edits:
        return
    flat, places = _places(logits, [(index, edit.banned_ids) for index, edit in edits])
    flat[places] = -torch.inf


def _penalize(logits: torch.Tensor, edits: list[tuple[int, LogitEdits, TokenCounts]]) -> None:
    if not edits:
        return
    flat, places = _places(logits, [(index, counts.ids) for index, _, counts in edits])
    sizes = [len(counts.ids) for _, _, counts in edits]
    factors = np.array(
        [(e.params.repetition_penalty, e.params.frequency_penalty, e.params.presence_penalty) for _, e, _ in edits],
        dtype=np.float32,
    )
    repetition, frequency, presence = torch.from_numpy(np.repeat(factors, sizes, axis=0).T.copy()).to(logits.device)
    output_counts = _on(logits, [counts.output_counts for _, _, counts in edits])
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[places] = values - frequency * output_counts - presence * (output_counts > 0)


def _places(logits: torch.Tensor, rows: list[tuple[int, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits as one flat view, and the places in it of each row's token ids."""
    vocab_size = logits.shape[1]
    places = np.concatenate([index * vocab_size + ids for index, ids in rows])
    return logits.view(-1), torch.from_numpy(places).to(logits.device)


def _on(logits: torch.Tensor, arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(logits.device)
