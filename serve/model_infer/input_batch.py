"""The batch that a worker keeps between steps, changed by plans and turned into the tensors of a step.

A row is a running request. The router names rows and pages; this side keeps for each row its page tables, how many
of its tokens are computed, and the token sampled last, which never leaves the device. A steady decode step touches
whole arrays only: its cost does not depend on Python loops over rows.

Packed order: decoding rows first, one token each, by row; then chunks in the order of the plan. So one-token
sequences lie together for attention, and the logits rows of decoding are a prefix of the packed tokens.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from kernels.interface import AttentionBatch, Run
from models.forward import ForwardBatch
from serve.ipc.messages import JoinRow, StepPlan
from serve.model_infer.errors import PlanError
from serve.model_infer.page_table import PageTable, WorkingPages
from serve.model_infer.readback import to_device
from serve.model_infer.step_inputs import PromptSpan, StepInputs


class TokenSource(Protocol):
    """The part of the request table that the batch reads."""

    def generation(self, slot: int) -> int: ...

    def tokens(self, slot: int) -> np.ndarray: ...


class InputBatch:
    """All rows of a worker. One thread; `apply` then `build` once a plan, in order of plans."""

    def __init__(
        self,
        page_tables: Mapping[str, PageTable],
        working_pages: Mapping[str, WorkingPages],
        leaves: Mapping[str, dict[str, torch.Tensor]],
        source: TokenSource,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """page_tables: of groups that are paged by place; working_pages: of groups of checkpoints."""
        self.page_tables = dict(page_tables)
        self.working_pages = dict(working_pages)
        self.leaves = dict(leaves)
        self.max_rows = max_rows
        self.device = device
        self.is_active = np.zeros(max_rows, dtype=bool)
        self.is_decoding = np.zeros(max_rows, dtype=bool)  # all known tokens computed
        self.context_lens = np.zeros(max_rows, dtype=np.int32)  # tokens computed
        self.num_known = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt = np.zeros(max_rows, dtype=np.int32)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._source = source
        self._known: list[np.ndarray | None] = [None] * max_rows
        self._scores_prompt: set[int] = set()
        self._decode: _DecodeRows | None = None
        self._sent_tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by group: as gathered, on the device
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._counting_long = self._counting.to(torch.int64)

    @property
    def num_rows(self) -> int:
        """Requests in the batch."""
        return int(self.is_active.sum())

    # --- changes by a plan -------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins and new pages, in this order. Raises PlanError; the batch is then not usable any more."""
        for row in plan.leaves:
            self._leave(row)
        for join in plan.joins:
            self._join(join)
        for row, group, pages in plan.new_pages:
            self._require_active(row)
            self._table(group).append(row, pages)

    def score_prompt(self, row: int) -> None:
        """The row wants log-probabilities of its prompt: its chunks ask for the logits of all their tokens."""
        self._scores_prompt.add(row)

    def snapshots(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        """(group, working page, checkpoint page) of what the plan wants after its step, which `build` has seen.

        Raises PlanError for a row that does not stand on a page boundary.
        """
        copies = []
        for row, group, page in plan.snapshots:
            self._require_active(row)
            working = self.working_pages.get(group)
            if working is None:
                raise PlanError(f"no state group {group!r} of checkpoints")
            if not self.context_lens[row] or self.context_lens[row] % working.page_tokens:
                raise PlanError(f"row {row}: {self.context_lens[row]} tokens are not a boundary to take a snapshot at")
            copies.append((group, working.page(row), page))
        return copies

    def store_sampled(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """token_ids int64 [S] on the device become the last tokens of the rows that sampled."""
        self.last_tokens.index_copy_(0, inputs.sample_index, token_ids)

    def _leave(self, row: int) -> None:
        self._require_active(row)
        for table in self.page_tables.values():
            table.clear(row)
        for working in self.working_pages.values():
            working.clear(row)
        self.is_active[row] = self.is_decoding[row] = False
        self.context_lens[row] = self.num_known[row] = self.num_prompt[row] = 0
        self._known[row] = None
        self._scores_prompt.discard(row)
        self._decode = None

    def _join(self, join: JoinRow) -> None:
        row = join.row
        if not 0 <= row < self.max_rows or self.is_active[row]:
            raise PlanError(f"row {row} is taken or not in [0, {self.max_rows})")
        if self._source.generation(join.slot) != join.generation:
            raise PlanError(f"row {row}: slot {join.slot} is no longer of generation {join.generation}")
        tokens = self._source.tokens(join.slot)
        if not 0 <= join.num_cached < join.num_known <= len(tokens) or not 0 < join.num_prompt <= join.num_known:
            raise PlanError(
                f"row {row}: {join.num_cached} cached, {join.num_prompt} prompt and {join.num_known} known tokens"
            )
        for group, pages in join.pages.items():
            if group in self.working_pages:
                self.working_pages[group].assign(row, pages)
            else:
                self._table(group).begin(row, join.first_places.get(group, 0))
                self._table(group).append(row, pages)
        self.is_active[row] = True
        self.context_lens[row] = join.num_cached
        self.num_known[row] = join.num_known
        self.num_prompt[row] = join.num_prompt
        self._known[row] = tokens[: join.num_known]

    def _table(self, group: str) -> PageTable:
        table = self.page_tables.get(group)
        if table is None:
            raise PlanError(f"no state group {group!r}")
        return table

    def _require_active(self, row: int) -> None:
        if not 0 <= row < self.max_rows or not self.is_active[row]:
            raise PlanError(f"row {row} is not in the batch")

    # --- the step ----------------------------------------------------------------------------------------------------

    def build(self, plan: StepPlan) -> StepInputs | None:
        """The step of a plan that `apply` has seen, or None when nothing is computed.

        Counts advance here: after the call the batch stands as it will after the step. Raises PlanError.
        """
        chunks = self._checked_chunks(plan.chunks)
        decode = self._decode_rows(plan.paused)
        if chunks:
            return self._build_mixed(decode, chunks)
        return self._build_decode(decode) if len(decode.rows) else None

    def _checked_chunks(self, chunks: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """(row, start, end) of each chunk; a row's known tokens [start, end) are computed."""
        checked = []
        for row, count in chunks:
            self._require_active(row)
            start = int(self.context_lens[row])
            if count < 1 or start + count > self.num_known[row]:
                raise PlanError(f"row {row}: chunk of {count} tokens after {start} of {self.num_known[row]} known")
            checked.append((row, start, start + count))
        if len({row for row, _, _ in checked}) != len(checked):
            raise PlanError("a row has two chunks in one plan")
        return checked

    def _decode_rows(self, paused: list[int]) -> "_DecodeRows":
        if paused:
            decoding = self.is_decoding.copy()
            for row in paused:
                self._require_active(row)
                decoding[row] = False
            return _DecodeRows(np.flatnonzero(decoding), self.device)
        if self._decode is None:
            self._decode = _DecodeRows(np.flatnonzero(self.is_decoding), self.device)
        return self._decode

    def _build_decode(self, decode: "_DecodeRows") -> StepInputs:
        num_rows = len(decode.rows)
        context_lens = self.context_lens[decode.rows] + 1
        positions = context_lens.astype(np.int64)
        attention = self._attention(
            decode.rows,
            decode.cpu_index,
            context_lens,
            self._counting[: num_rows + 1],
            self._to_device(positions - 1),
            self._counting[:num_rows],
        )
        self.context_lens[decode.rows] = context_lens
        token_ids = self.last_tokens.index_select(0, decode.index)
        state_pages = self._state_pages(decode.cpu_index)
        forward = ForwardBatch(token_ids, attention, self.leaves, self._counting_long[:num_rows], state_pages)
        return StepInputs(forward, decode.rows, decode.rows, decode.index, positions, [], num_rows)

    def _build_mixed(self, decode: "_DecodeRows", chunks: list[tuple[int, int, int]]) -> StepInputs:
        num_decode = len(decode.rows)
        bounds = np.array(chunks, dtype=np.int64)  # [C, 3]: row, start, end
        rows = np.concatenate([decode.rows, bounds[:, 0]])
        starts = np.concatenate([self.context_lens[decode.rows].astype(np.int64), bounds[:, 1]])
        ends = np.concatenate([starts[:num_decode] + 1, bounds[:, 2]])
        lengths = ends - starts
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_starts[1:])
        num_tokens = int(query_starts[-1])
        positions = np.arange(num_tokens) + np.repeat(starts - query_starts[:-1], lengths)
        cpu_index = torch.from_numpy(rows)
        attention = self._attention(
            rows,
            cpu_index,
            ends.astype(np.int32),
            self._to_device(query_starts.astype(np.int32)),
            self._to_device(positions),
            self._to_device(np.repeat(np.arange(len(rows), dtype=np.int32), lengths)),
            runs=tuple(
                Run(sequence, int(query_starts[sequence]), end - start, end)
                for sequence, (_, start, end) in enumerate(chunks, num_decode)
                if end - start > 1
            ),
        )
        is_sampling = ends >= self.num_known[rows]
        sampling = np.flatnonzero(is_sampling)
        spans, span_rows = self._prompt_spans(chunks, query_starts[num_decode:], len(sampling))
        logits_rows = np.concatenate([query_starts[1:][sampling] - 1, *span_rows])
        forward = ForwardBatch(
            self._mixed_token_ids(decode, chunks),
            attention,
            self.leaves,
            self._to_device(logits_rows),
            self._state_pages(cpu_index),
        )
        self.context_lens[rows] = ends
        finished = rows[num_decode:][is_sampling[num_decode:]]
        if len(finished):
            self.is_decoding[finished] = True
            self._decode = None
        sample_rows = rows[sampling]
        return StepInputs(forward, rows, sample_rows, self._to_device(sample_rows), ends[sampling], spans, num_tokens)

    def _attention(
        self,
        rows: np.ndarray,
        cpu_index: torch.Tensor,
        context_lens: np.ndarray,
        query_starts: torch.Tensor,
        positions: torch.Tensor,
        sequence_ids: torch.Tensor,
        runs: tuple[Run, ...] = (),
    ) -> dict[str, AttentionBatch]:
        max_context_len = int(context_lens.max())
        lens = self._to_device(context_lens)

        def of_group(page_table: torch.Tensor, page_tokens: int) -> AttentionBatch:
            return AttentionBatch(
                query_starts=query_starts,
                context_lens=lens,
                page_table=page_table,
                positions=positions,
                sequence_ids=sequence_ids,
                max_query_len=max((run.length for run in runs), default=1),
                max_context_len=max_context_len,
                page_size=page_tokens,
                runs=runs,
            )

        attention = {}
        for name, table in self.page_tables.items():
            table.require(rows, context_lens)
            page_table = self._send_table(name, table.gather(cpu_index, max_context_len))
            attention[name] = of_group(page_table, table.page_tokens)
        for name, working in self.working_pages.items():
            no_pages = torch.empty((len(rows), 0), dtype=torch.int32, device=self.device)
            attention[name] = of_group(no_pages, working.page_tokens)
        return attention

    def _state_pages(self, cpu_index: torch.Tensor) -> dict[str, torch.Tensor]:
        """int64 [B] on the device, of each group of checkpoints."""
        return {name: self._send_table(name, working.gather(cpu_index)) for name, working in self.working_pages.items()}

    def _send_table(self, group: str, gathered: torch.Tensor) -> torch.Tensor:
        """The table, or the working pages, on the device; the same tensor as in the step before where that had the same
        table."""
        sent = self._sent_tables.get(group)
        if sent is None or sent[0] is not gathered:
            sent = self._sent_tables[group] = (gathered, to_device(gathered, self.device))
        return sent[1]

    def _mixed_token_ids(self, decode: "_DecodeRows", chunks: list[tuple[int, int, int]]) -> torch.Tensor:
        known = np.concatenate([self._known_tokens(row)[start:end] for row, start, end in chunks])
        token_ids = self._to_device(known.astype(np.int64))
        if not len(decode.rows):
            return token_ids
        return torch.cat([self.last_tokens.index_select(0, decode.index), token_ids])

    def _prompt_spans(
        self, chunks: list[tuple[int, int, int]], query_starts: np.ndarray, first_logit: int
    ) -> tuple[list[PromptSpan], list[np.ndarray]]:
        """Spans of the chunks whose rows score their prompt, and the packed rows of their logits.

        The token at position p scores the one at p + 1, so a chunk [start, end) of a prompt of n tokens scores
        [start + 1, min(end, n - 1) + 1).
        """
        spans: list[PromptSpan] = []
        packed_rows: list[np.ndarray] = []
        for (row, start, end), packed in zip(chunks, query_starts[:-1], strict=True):
            last = min(end, int(self.num_prompt[row]) - 1)
            if row not in self._scores_prompt or last <= start:
                continue
            targets = self._known_tokens(row)[start + 1 : last + 1].astype(np.int64)
            spans.append(PromptSpan(row, targets, first_logit))
            packed_rows.append(np.arange(packed, packed + last - start))
            first_logit += last - start
        return spans, packed_rows

    def _known_tokens(self, row: int) -> np.ndarray:
        known = self._known[row]
        if known is None:
            raise PlanError(f"row {row} is not in the batch")
        return known

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Contradictions in the batch's books, one line each; none in a sound one."""
        problems = []
        for name, table in self.page_tables.items():
            if table.counts[~self.is_active].any():
                problems.append(f"group {name!r}: pages in rows outside of the batch")
            if (table.counts * table.page_tokens < self.context_lens).any():
                problems.append(f"group {name!r}: a row has more tokens than its pages hold")
        for name, working in self.working_pages.items():
            if (working.is_held != self.is_active).any():
                problems.append(f"group {name!r}: a row without its working page, or a working page without its row")
        if (self.is_decoding != (self.is_active & (self.context_lens >= self.num_known))).any():
            problems.append("a row decodes that should not, or the other way round")
        return problems


class _DecodeRows:
    """The rows that decode, as the forms in which a step needs them."""

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        self.rows = rows
        self.cpu_index = torch.from_numpy(rows)
        self.index = to_device(self.cpu_index, device)
