"""The batch against a slow oracle that keeps plain lists."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.ipc.messages import JoinRow, StepPlan
from serve.model_infer.errors import PlanError
from serve.model_infer.input_batch import InputBatch
from serve.model_infer.page_table import PageTable, WorkingPages
from serve.model_infer.step_inputs import StepInputs
from unit_tests.serve.model_infer.builders import CPU, FakeTable, join, make_batch

PAGE = 4
NAMES = ("full", "other")


@dataclass
class OracleRow:
    tokens: list[int]  # prompt, then all sampled
    num_prompt: int
    num_known: int
    context: int
    scores_prompt: bool
    pages: dict[str, list[int]] = field(default_factory=dict)


def oracle_runs(rows: dict[int, OracleRow], plan: StepPlan) -> list[tuple[int, int, int]]:
    """(row, start, end) of each packed sequence."""
    decode = [
        (row, state.context, state.context + 1)
        for row, state in sorted(rows.items())
        if state.context >= state.num_known and row not in plan.paused
    ]
    return decode + [(row, rows[row].context, rows[row].context + count) for row, count in plan.chunks]


def check_step(inputs: StepInputs, runs: list[tuple[int, int, int]], rows: dict[int, OracleRow]) -> None:
    tokens = [token for row, start, end in runs for token in rows[row].tokens[start:end]]
    assert inputs.forward.token_ids.tolist() == tokens
    assert inputs.forward.token_ids.dtype == torch.int64
    assert inputs.num_tokens == len(tokens)
    assert inputs.rows.tolist() == [row for row, _, _ in runs]
    lengths = [end - start for _, start, end in runs]
    for name in NAMES:
        attention = inputs.forward.attention[name]
        assert attention.query_starts.tolist() == [sum(lengths[:i]) for i in range(len(runs) + 1)]
        assert attention.context_lens.tolist() == [end for _, _, end in runs]
        assert attention.positions.tolist() == [p for _, start, end in runs for p in range(start, end)]
        assert attention.sequence_ids.tolist() == [b for b, n in enumerate(lengths) for _ in range(n)]
        assert attention.max_query_len == max(lengths)
        assert attention.max_context_len == max(end for _, _, end in runs)
        assert attention.page_size == PAGE
        assert attention.page_table.is_contiguous()
        dtypes = (attention.query_starts.dtype, attention.context_lens.dtype, attention.page_table.dtype)
        assert dtypes == (torch.int32,) * 3
        assert (attention.positions.dtype, attention.sequence_ids.dtype) == (torch.int64, torch.int32)
        for b, (row, _, end) in enumerate(runs):
            needed = -(-end // PAGE)
            assert attention.page_table[b, :needed].tolist() == rows[row].pages[name][:needed]
    check_logits(inputs, runs, rows)


def check_logits(inputs: StepInputs, runs: list[tuple[int, int, int]], rows: dict[int, OracleRow]) -> None:
    logits_rows, sampling, spans, packed = [], [], [], 0
    for row, start, end in runs:
        state = rows[row]
        if end >= state.num_known:
            logits_rows.append(packed + end - start - 1)
            sampling.append((row, end))
        last = min(end, state.num_prompt - 1)
        if state.scores_prompt and start < state.num_known and last > start:
            spans.append((row, state.tokens[start + 1 : last + 1], range(packed, packed + last - start)))
        packed += end - start
    assert list(zip(inputs.sample_rows.tolist(), inputs.sample_positions.tolist(), strict=True)) == sampling
    assert inputs.sample_index.tolist() == inputs.sample_rows.tolist()
    all_rows = logits_rows + [packed_row for _, _, packed_rows in spans for packed_row in packed_rows]
    assert inputs.forward.logits_rows.tolist() == all_rows
    assert [(span.row, span.targets.tolist()) for span in inputs.prompt_spans] == [s[:2] for s in spans]
    for span, (_, _, packed_rows) in zip(inputs.prompt_spans, spans, strict=True):
        found = all_rows[span.first_logit : span.first_logit + len(span.targets)]
        assert found == list(packed_rows)


class Router:
    """Draws random legal plans and keeps what the oracle needs."""

    def __init__(self, data: st.DataObject, max_rows: int) -> None:
        self.data, self.max_rows = data, max_rows
        self.table = FakeTable(num_tokens=64)
        self.rows: dict[int, OracleRow] = {}
        self.next_slot = 0
        self.next_page = 0

    def draw_plan(self, step: int) -> StepPlan:
        draw = self.data.draw
        leaves = draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, max_size=2)) if self.rows else []
        for row in leaves:
            del self.rows[row]
        plan = StepPlan(1, step, leaves=leaves)
        free = [row for row in range(self.max_rows) if row not in self.rows]
        for row in draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []:
            plan.joins.append(self.join(row))
        for row, state in self.rows.items():
            if state.context < state.num_known and draw(st.booleans()):
                plan.chunks.append((row, draw(st.integers(1, state.num_known - state.context))))
            elif state.context >= state.num_known and (state.context >= 60 or draw(st.integers(0, 4)) == 0):
                plan.paused.append(row)
        for row, _, end in oracle_runs(self.rows, plan):
            for name in NAMES:
                missing = -(-end // PAGE) - len(self.rows[row].pages[name])
                if missing > 0:
                    plan.new_pages.append((row, name, self.take_pages(row, name, missing)))
        return plan

    def take_pages(self, row: int, name: str, count: int) -> list[int]:
        pages = [(self.next_page + i) % 1000 for i in range(count)]
        self.next_page += count
        self.rows[row].pages[name] += pages
        return pages

    def join(self, row: int) -> JoinRow:
        draw = self.data.draw
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
        generation = self.table.fill(slot, tokens)
        num_prompt = draw(st.integers(1, len(tokens)))
        cached = draw(st.integers(0, len(tokens) - 1))
        scores = num_prompt == len(tokens) and draw(st.booleans())
        self.rows[row] = OracleRow(tokens, num_prompt, len(tokens), cached, scores, {name: [] for name in NAMES})
        pages = {name: self.take_pages(row, name, -(-cached // PAGE)) for name in NAMES}
        return JoinRow(row, slot, generation, num_prompt, len(tokens), cached, pages)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_step_of_random_plans_is_what_the_oracle_says(data: st.DataObject):
    router = Router(data, max_rows=5)
    batch = make_batch(router.table, max_rows=5, page_size=PAGE, names=NAMES)
    for step in range(data.draw(st.integers(1, 14))):
        plan = router.draw_plan(step)
        batch.apply(plan)
        for joined in plan.joins:
            if router.rows[joined.row].scores_prompt:
                batch.score_prompt(joined.row)
        runs = oracle_runs(router.rows, plan)
        inputs = batch.build(plan)
        assert batch.check_integrity() == []
        assert batch.num_rows == len(router.rows)
        if not runs:
            assert inputs is None
            continue
        assert inputs is not None
        check_step(inputs, runs, router.rows)
        sampled = [
            (7 * row + 3 * int(position)) % 101
            for row, position in zip(inputs.sample_rows, inputs.sample_positions, strict=True)
        ]
        batch.store_sampled(inputs, torch.tensor(sampled, dtype=torch.int64))
        for row, _, end in runs:
            router.rows[row].context = end
        for row, token in zip(inputs.sample_rows.tolist(), sampled, strict=True):
            router.rows[row].tokens.append(token)


def joined_batch(num_prompt: int = 6, pages: list[int] | None = None):
    table = FakeTable()
    generation = table.fill(0, list(range(num_prompt)))
    batch = make_batch(table)
    batch.apply(StepPlan(1, 0, joins=[join(2, 0, generation, num_prompt, pages or [5, 6])]))
    return batch, table, generation


def run(batch: InputBatch, plan: StepPlan) -> StepInputs | None:
    batch.apply(plan)
    return batch.build(plan)


def test_a_plan_of_leaves_only_computes_nothing():
    batch, _, _ = joined_batch()
    plan = StepPlan(1, 1, leaves=[2])
    batch.apply(plan)
    assert batch.build(plan) is None
    assert batch.num_rows == 0


def test_a_row_left_and_taken_in_one_plan_holds_only_its_new_pages():
    batch, table, _ = joined_batch()
    generation = table.fill(1, [9, 9])
    batch.apply(StepPlan(1, 1, leaves=[2], joins=[join(2, 1, generation, 2, [8])]))
    assert batch.page_tables["full"].pages(2) == [8]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, 1, leaves=[3]), "row 3 is not in the batch"),
        (StepPlan(1, 1, leaves=[99]), "row 99 is not in the batch"),
        (StepPlan(1, 1, new_pages=[(3, "full", [1])]), "row 3 is not in the batch"),
        (StepPlan(1, 1, new_pages=[(2, "window", [1])]), "no state group 'window'"),
        (StepPlan(1, 1, new_pages=[(2, "full", [1000])]), "not in"),
        (StepPlan(1, 1, joins=[join(2, 0, 1, 6, [])]), "row 2 is taken"),
        (StepPlan(1, 1, joins=[join(8, 0, 1, 6, [])]), "row 8 is taken or not in"),
        (StepPlan(1, 1, joins=[join(3, 0, 2, 6, [])]), "no longer of generation 2"),
        (StepPlan(1, 1, joins=[join(3, 0, 1, 6, [], num_cached=6)]), "6 cached"),
        (StepPlan(1, 1, joins=[join(3, 0, 1, 6, [], num_known=5)]), "5 known"),
        (StepPlan(1, 1, joins=[join(3, 0, 1, 6, [], num_known=5000)]), "5000 known"),
        (StepPlan(1, 1, chunks=[(2, 7)]), "chunk of 7 tokens after 0 of 6"),
        (StepPlan(1, 1, chunks=[(2, 0)]), "chunk of 0"),
        (StepPlan(1, 1, chunks=[(4, 1)]), "row 4 is not in the batch"),
        (StepPlan(1, 1, chunks=[(2, 1), (2, 1)]), "two chunks"),
        (StepPlan(1, 1, paused=[4]), "row 4 is not in the batch"),
    ],
)
def test_a_contradicting_plan_is_refused(plan: StepPlan, message: str):
    batch, _, _ = joined_batch()
    with pytest.raises(PlanError, match=message):
        run(batch, plan)


def test_a_decode_step_without_room_is_refused():
    batch, _, _ = joined_batch(num_prompt=8)
    plan = StepPlan(1, 1, chunks=[(2, 8)])
    batch.apply(plan)
    batch.build(plan)
    with pytest.raises(PlanError, match="cannot hold 9 tokens"):
        batch.build(StepPlan(1, 2))


def test_context_counts_stay_exact_over_many_decode_steps():
    batch, _, _ = joined_batch(num_prompt=4, pages=list(range(40)))
    batch.build(StepPlan(1, 1, chunks=[(2, 4)]))
    for step in range(100):
        inputs = batch.build(StepPlan(1, step + 2))
        assert inputs is not None
        assert inputs.forward.attention["full"].positions.tolist() == [4 + step]
    np.testing.assert_array_equal(batch.context_lens[2], 104)


def make_hybrid_batch(table: FakeTable) -> InputBatch:
    """Groups full, window and recurrent."""
    tables = {name: PageTable(name, PAGE, 100, 4, 4) for name in ("full", "window")}
    working = {"recurrent": WorkingPages("recurrent", PAGE, 20, 4)}
    leaves = {name: {"leaf": torch.zeros(1)} for name in ("full", "window", "recurrent")}
    return InputBatch(tables, working, leaves, table, 4, CPU)


def hybrid_join(row: int, generation: int, known: int, cached: int, working: int, first_place: int) -> JoinRow:
    pages = {"full": list(range(8)), "window": [40, 41, 42], "recurrent": [working]}
    restores = {"recurrent": 19} if cached else {}
    return JoinRow(row, row, generation, known, known, cached, pages, {"window": first_place}, restores)


def test_windows_begin_late_and_checkpoint_groups_have_working_pages():
    table = FakeTable()
    batch = make_hybrid_batch(table)
    joins = [hybrid_join(1, table.fill(1, list(range(20))), 20, 16, 5, 3)]
    joins.append(hybrid_join(3, table.fill(3, list(range(7))), 7, 0, 9, 0))
    plan = StepPlan(1, 0, joins=joins, chunks=[(3, 7), (1, 4)])
    batch.apply(plan)
    forward = batch.build(plan).forward
    assert forward.state_pages["recurrent"].tolist() == [9, 5]
    assert forward.attention["window"].page_table.tolist()[1] == [0, 0, 0, 40, 41][:5]
    assert forward.attention["window"].page_table.tolist()[0][:3] == [40, 41, 42]
    recurrent = forward.attention["recurrent"]
    assert recurrent.page_table.shape == (2, 0)
    assert recurrent.query_starts.tolist() == [0, 7, 11]
    assert batch.check_integrity() == []
    plan = StepPlan(1, 1, paused=[3])
    assert batch.build(plan).forward.state_pages["recurrent"].tolist() == [5]
    batch.apply(StepPlan(1, 2, leaves=[1]))
    assert batch.check_integrity() == []
    assert batch.build(StepPlan(1, 2)).forward.state_pages["recurrent"].tolist() == [9]


def test_snapshots_are_taken_of_rows_on_a_boundary():
    table = FakeTable()
    batch = make_hybrid_batch(table)
    plan = StepPlan(1, 0, joins=[hybrid_join(0, table.fill(0, list(range(9))), 9, 0, 5, 0)], chunks=[(0, 8)])
    batch.apply(plan)
    batch.build(plan)
    plan.snapshots = [(0, "recurrent", 13)]
    assert batch.snapshots(plan) == [("recurrent", 5, 13)]
    plan.snapshots = [(0, "window", 13)]
    with pytest.raises(PlanError, match="no state group 'window' of checkpoints"):
        batch.snapshots(plan)
    plan = StepPlan(1, 1, chunks=[(0, 1)], snapshots=[(0, "recurrent", 13)])
    batch.build(plan)
    with pytest.raises(PlanError, match="9 tokens are not a boundary"):
        batch.snapshots(plan)
