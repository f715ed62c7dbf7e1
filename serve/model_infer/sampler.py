"""Chooses the next token of every row that samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from serve.ipc.messages import TokenLogprobs
from serve.model_infer.greedy import greedy_tokens
from serve.model_infer.logprobs import token_logprobs
from serve.model_infer.penalties import LogitEdits, ParameterError, apply_edits
from serve.model_infer.readback import Readback, to_device
from serve.model_infer.rng import draw_keys
from serve.model_infer.row_draw import RowDrawer
from serve.model_infer.sampling_rows import SamplingRows
from serve.model_infer.truncation import TruncationParams, draw_full, draw_truncated
from serve.types import SamplingParams


@dataclass(frozen=True)
class SampledTokens:
    """What sampling gave. token_ids: int64 [S] on the device, in the order of the logits.

    id_list: the same as plain ints. logprobs: by batch row, where wanted. failed: batch row -> one line; its token
    means nothing.
    """

    token_ids: torch.Tensor
    id_list: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    """What the end of a step needs: rows may have other requests by then.

    rows: int64 [S]. edits: (logits row, position, edits) of a row. raw: rows that want log-probabilities, with their
    logits. unusable: batch row -> why its parameters do not fit.
    """

    rows: np.ndarray
    token_ids: torch.Tensor
    edits: list[tuple[int, int, LogitEdits]]
    raw: tuple[list[int], torch.Tensor] | None
    unusable: dict[int, str]


class PendingTokens:
    """Tokens that are being sampled. token_ids: int64 [S] on the device, in the order of the logits."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        maxima: torch.Tensor,
        finish: Callable[[list[int], np.ndarray], SampledTokens],
    ) -> None:
        """maxima: float32 [S], not finite where a row's logits are not. finish: gets ids, and which rows are finite."""
        self.token_ids = token_ids
        self._readback = Readback([token_ids, maxima], token_ids.device)
        self._finish = finish
        self._result: SampledTokens | None = None

    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        return self._result is not None or self._readback.is_done()

    def result(self) -> SampledTokens:
        """Waits for the device."""
        if self._result is None:
            token_ids, maxima = self._readback.wait()
            self._result = self._finish(token_ids.tolist(), np.isfinite(maxima.numpy()))
        return self._result


class Sampler:
    """Sampling of all rows of a batch, in float32. Lives on rank 0 only.

    A token depends on its row's logits, parameters, seed and position, never on the other rows. end_ids: the tokens
    that end a text of this model.
    """

    def __init__(self, max_rows: int, vocab_size: int, end_ids: Sequence[int], device: torch.device) -> None:
        self._rows = SamplingRows(max_rows)
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._device = device
        self._row_drawer = RowDrawer(vocab_size)
        self._draw = self._draw_by_row if device.type == "cpu" else self._draw_batched

    def add(self, row: int, params: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> None:
        """A request enters `row` with the ids of its prompt and of what it has generated before.

        Parameters that do not fit the model make the row fail whenever it samples.
        """
        try:
            self._rows.add(row, params, prompt, output, self._end_ids, self._vocab_size)
        except ParameterError as error:
            self._rows.unusable[row] = str(error)

    def remove(self, row: int) -> None:
        """The request has left."""
        self._rows.remove(row)

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> SampledTokens:
        """`launch` and its result."""
        return self.launch(logits, rows, positions).result()

    def launch(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> "PendingTokens":
        """Next tokens of rows int64 [S] from logits float32 [S, V], which may be changed; positions int64 [S].

        Does not wait for the device but where a row asks for something that only the host can do: log-probabilities,
        penalties, truncated draws.
        """
        edits, raw = self._prepare_edits(logits, rows, positions)
        apply_edits(logits, edits)
        token_ids, maxima = greedy_tokens(logits)
        draws = self._rows.temperature[rows] > 0
        if logits.device.type == "cpu":
            draws &= np.isfinite(maxima.numpy())
        drawing = np.flatnonzero(draws)
        if len(drawing):
            self._draw(logits, maxima, rows, positions, drawing, token_ids)
        step = _Step(rows, token_ids, edits, raw, self._unusable(rows))
        pending = PendingTokens(token_ids, maxima, partial(self._finish, step))
        if edits or raw is not None:  # the next step needs the counts, and changes the logits
            pending.result()
        return pending

    def _finish(self, step: "_Step", id_list: list[int], is_finite: np.ndarray) -> SampledTokens:
        for index, _, edit in step.edits:
            if edit.counts is not None:
                edit.counts.add(id_list[index])
        failed = {int(row): "the model's logits are not finite" for row in step.rows[~is_finite]} | step.unusable
        return SampledTokens(step.token_ids, id_list, self._logprobs(step, failed), failed)

    def _prepare_edits(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[tuple[int, int, LogitEdits]], tuple[list[int], torch.Tensor] | None]:
        """Edits of this step; and, where log-probabilities are wanted, logits rows as they were before."""
        known = self._rows
        if not known.edits and not known.num_logprobs:
            return [], None
        row_list = rows.tolist()
        edits = [
            (index, int(positions[index]), known.edits[row]) for index, row in enumerate(row_list) if row in known.edits
        ]
        scored = [index for index, row in enumerate(row_list) if row in known.num_logprobs]
        if not scored:
            return edits, None
        if not edits and len(scored) == len(row_list):
            return edits, (scored, logits)
        return edits, (scored, logits[torch.tensor(scored, device=logits.device)])

    def _draw_by_row(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        drawing: np.ndarray,
        token_ids: torch.Tensor,
    ) -> None:
        """Replace token_ids at the logits rows `drawing` by drawn ones; on the CPU, see `row_draw`."""
        ids, all_logits, peaks = token_ids.numpy(), logits.numpy(), maxima.tolist()
        keys = draw_keys(self._rows.seed[rows[drawing]], positions[drawing]).tolist()
        for index, key in zip(drawing.tolist(), keys, strict=True):
            rules = self._rows.rules[rows[index]]
            if rules is not None:
                ids[index] = self._row_drawer.draw(all_logits[index], peaks[index], rules, key)

    def _draw_batched(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        drawing: np.ndarray,
        token_ids: torch.Tensor,
    ) -> None:
        """The same with tensor operations over all rows; on other devices."""
        is_truncated = self._rows.is_truncated[rows[drawing]]
        for part, truncates in ((drawing[~is_truncated], False), (drawing[is_truncated], True)):
            if not len(part):
                continue
            chosen = rows[part]
            places = self._on_device(part)
            temperature = self._on_device(self._rows.temperature[chosen])
            keys = self._on_device(draw_keys(self._rows.seed[chosen], positions[part]).view(np.int64))
            scaled = (logits if len(part) == len(logits) else logits[places]) / temperature[:, None]
            peaks = maxima[places] / temperature
            if truncates:
                token_ids[places] = draw_truncated(scaled, peaks, keys, self._truncation(chosen))
            else:
                token_ids[places] = draw_full(scaled, peaks, keys)

    def _truncation(self, rows: np.ndarray) -> TruncationParams:
        top_k, top_p, min_p = (part[rows] for part in (self._rows.top_k, self._rows.top_p, self._rows.min_p))
        return TruncationParams(
            self._on_device(top_k),
            self._on_device(top_p),
            self._on_device(min_p),
            has_nuclei=bool(((top_k == 0) & (top_p < 1.0)).any()),
            has_floors=bool((min_p > 0.0).any()),
        )

    def _unusable(self, rows: np.ndarray) -> dict[int, str]:
        known = self._rows.unusable
        return {row: known[row] for row in rows.tolist() if row in known} if known else {}

    def _logprobs(self, step: "_Step", failed: dict[int, str]) -> dict[int, TokenLogprobs]:
        if step.raw is None:
            return {}
        scored, logits = step.raw
        scored_rows = [int(step.rows[index]) for index in scored]
        counts = [self._rows.num_logprobs[row] for row in scored_rows]
        entries = token_logprobs(logits, step.token_ids[torch.tensor(scored, device=step.token_ids.device)], counts)
        return {row: entry for row, entry in zip(scored_rows, entries, strict=True) if row not in failed}

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)
