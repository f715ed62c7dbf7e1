"""Decode steps by replay: the same texts as without, and padding that touches nothing but the spare page."""

import dataclasses

import pytest
import torch

from kernels.interface import AttentionBatch
from models.forward import ForwardBatch
from serve.model_infer.decode_buffers import DecodeBuffers, GroupPool
from serve.model_infer.graphs import DecodeGraphs, graph_sizes
from serve.model_infer.tail_graph import TAIL_TOKENS
from unit_tests.serve.model_infer.builders import CPU, FakeTable
from unit_tests.serve.model_infer.tiny_llama import VOCAB, Driver, follows_greedily, make_runner, random_prompt

PAGE = 4


class FakeGraph:
    """Replays by running again."""

    def __init__(self, run) -> None:
        self.run = run
        self.num_replays = 0
        run()

    def replay(self) -> None:
        self.num_replays += 1
        self.run()


class FakeModel:
    """Notes the batches; a row's logits are its token, position, context and first page."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        attention = batch.attention["full"]
        self.sizes.append(len(batch.token_ids))
        of_tokens = attention.sequence_ids.long()
        contexts, pages = attention.context_lens[of_tokens], attention.page_table[of_tokens, 0]
        columns = (batch.token_ids, attention.positions, contexts, pages)
        return torch.stack([column.float() for column in columns], dim=1)[batch.logits_rows]


def make_batch(rows: list[tuple[int, int, list[int]]]) -> ForwardBatch:
    """Rows of (token, context length, pages)."""
    width = max(len(pages) for _, _, pages in rows)
    lens = torch.tensor([context for _, context, _ in rows], dtype=torch.int32)
    counting = torch.arange(len(rows) + 1, dtype=torch.int32)
    attention = AttentionBatch(
        query_starts=counting,
        context_lens=lens,
        page_table=torch.tensor([pages + [0] * (width - len(pages)) for _, _, pages in rows], dtype=torch.int32),
        positions=lens.long() - 1,
        sequence_ids=counting[:-1],
        max_query_len=1,
        max_context_len=int(lens.max()),
        page_size=PAGE,
    )
    tokens = torch.tensor([token for token, _, _ in rows])
    return ForwardBatch(tokens, {"full": attention}, {}, counting[:-1].long())


def make_graphs(max_rows: int = 8) -> tuple[DecodeGraphs, FakeModel]:
    model = FakeModel()
    groups = {"full": GroupPool({"kv": torch.zeros(11, 1)}, PAGE, 3)}  # pages 0 to 9 and the spare one
    return DecodeGraphs(model, groups, max_rows, 4, CPU, FakeGraph), model


def test_sizes_end_with_the_largest_batch():
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(4096)[-1] == 512


def test_a_batch_runs_in_the_smallest_graph_that_holds_it():
    graphs, model = make_graphs()
    rows = [(5, 9, [3, 1, 2]), (6, 2, [7]), (8, 4, [0])]
    assert graphs.forward(make_batch(rows)).tolist() == [[5, 8, 9, 3], [6, 1, 2, 7], [8, 3, 4, 0]]
    assert graphs.forward(make_batch(rows[:1])).tolist() == [[5, 8, 9, 3]]
    assert graphs.forward(make_batch(rows[1:])).tolist() == [[6, 1, 2, 7], [8, 3, 4, 0]]
    assert model.sizes == [4, 4, 1, 1, 2, 2]


def test_too_many_rows_or_too_wide_a_table_are_left_to_the_model():
    graphs, model = make_graphs(max_rows=2)
    assert graphs.forward(make_batch([(1, 1, [0])] * 3)) is None
    assert graphs.forward(make_batch([(1, 13, [0, 1, 2, 3])])) is None
    assert model.sizes == []


def test_all_sizes_are_captured_with_padding_only():
    graphs, model = make_graphs()
    graphs.forward(make_batch([(5, 9, [3, 1, 2])] * 5))
    graphs.capture_all()
    assert model.sizes == [8, 8, 4, 2, 1, TAIL_TOKENS]
    assert graphs._logits[:4].tolist() == [[0, 0, 1, 10]] * 4  # the spare page


def test_rows_that_leave_become_padding():
    buffers = DecodeBuffers({"full": GroupPool({"kv": torch.zeros(11, 1)}, PAGE, 3)}, 4, CPU)
    buffers.fill(make_batch([(5, 9, [3, 1, 2]), (6, 2, [7]), (8, 4, [0])]))
    buffers.fill(make_batch([(6, 3, [7])]))
    batch = buffers.batch(4)
    attention = batch.attention["full"]
    assert batch.token_ids.tolist() == [6, 0, 0, 0]
    assert attention.context_lens.tolist() == [3, 1, 1, 1]
    assert attention.positions.tolist() == [2, 0, 0, 0]
    assert attention.page_table[:, 0].tolist() == [7, 10, 10, 10]
    assert attention.query_starts.tolist() == [0, 1, 2, 3, 4]


def test_working_pages_of_padding_are_the_spare_one():
    groups = {
        "full": GroupPool({"kv": torch.zeros(11, 1)}, PAGE, 3),
        "recurrent": GroupPool({"state": torch.zeros(7, 1)}, PAGE, 0),
    }
    buffers = DecodeBuffers(groups, 4, CPU)
    assert buffers.batch(4).state_pages["recurrent"].tolist() == [6, 6, 6, 6]
    buffers.fill(with_working(make_batch([(5, 9, [3, 1, 2]), (6, 2, [7]), (8, 4, [0])]), [4, 0, 2]))
    assert buffers.batch(4).state_pages["recurrent"].tolist() == [4, 0, 2, 6]
    buffers.fill(with_working(make_batch([(6, 3, [7])]), [0]))
    batch = buffers.batch(2)
    assert batch.state_pages["recurrent"].tolist() == [0, 6]
    assert batch.attention["recurrent"].page_table.shape == (2, 0)
    assert batch.leaves["recurrent"] is groups["recurrent"].leaves


def with_working(batch: ForwardBatch, pages: list[int]) -> ForwardBatch:
    """The same step of a model that also has a group of checkpoints."""
    no_pages = torch.empty((len(pages), 0), dtype=torch.int32)
    attention = {**batch.attention, "recurrent": dataclasses.replace(batch.attention["full"], page_table=no_pages)}
    return dataclasses.replace(batch, attention=attention, state_pages={"recurrent": torch.tensor(pages)})


def test_a_table_is_copied_again_after_its_rows_were_padding():
    graphs, _ = make_graphs()
    batch = make_batch([(5, 9, [3, 1, 2])])
    graphs.forward(batch)
    graphs.capture_all()
    assert graphs.forward(batch).tolist() == [[5, 8, 9, 3]]


@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_texts_are_those_of_the_model_and_only_the_spare_page_is_touched(num_rows: int):
    table = FakeTable(num_tokens=512)
    runner = make_runner(table)
    leaves = runner._states.leaves()["full"]
    pool = leaves["kv"]
    groups = {"full": GroupPool(leaves, 16, 4)}
    graphs = runner._graphs = DecodeGraphs(runner._model, groups, 8, VOCAB, CPU, FakeGraph)
    graphs.capture_all()
    driver = Driver(runner, table)
    prompts = [random_prompt(10 + 3 * row, row) for row in range(num_rows)]
    for row, prompt in enumerate(prompts):
        driver.join(row, row, prompt)
        driver.run({row: len(prompt)})  # prompts beside rows that decode: not by replay
    for _ in range(20):
        driver.run()
    if num_rows > 1:
        driver.run(leaves=[0])
        driver.run(paused=[1])
    for _ in range(3):
        driver.run()
    for slot, prompt in enumerate(prompts):
        assert follows_greedily(prompt, driver.outputs[slot])
    assert sum(graph.num_replays for graph in graphs._replays.values()) >= 23
    used = {page for pages in driver.pages.values() for page in pages}
    unused = [page for page in range(len(pool) - 1) if page not in used]
    assert not pool[unused].any()


@pytest.mark.parametrize(("before", "tail"), [(0, 2), (16, 16), (20, 30), (3, 47)])
def test_the_tail_of_a_prompt_is_replayed_and_touches_only_its_own_pages_and_the_spare_one(before: int, tail: int):
    table = FakeTable(num_tokens=512)
    runner = make_runner(table)
    leaves = runner._states.leaves()["full"]
    graphs = runner._graphs = DecodeGraphs(runner._model, {"full": GroupPool(leaves, 16, 4)}, 8, VOCAB, CPU, FakeGraph)
    graphs.capture_all()
    driver = Driver(runner, table)
    for row in range(2):  # the second one finds the buffers as the first one left them
        prompt = random_prompt(before + tail, row)
        driver.join(row, row, prompt)
        if before:
            driver.run({row: before}, paused=[0] if row else None)
        replays = graphs._tail._replay.num_replays
        driver.run({row: tail}, paused=[0] if row else None)
        assert graphs._tail._replay.num_replays == replays + 1
    for _ in range(5):
        driver.run()
    for slot in range(2):
        assert follows_greedily(driver.prompts[slot], driver.outputs[slot])
    used = {page for pages in driver.pages.values() for page in pages}
    unused = [page for page in range(len(leaves["kv"]) - 1) if page not in used]
    assert not leaves["kv"][unused].any()


def test_more_than_a_tail_is_left_to_the_model():
    graphs, model = make_graphs()
    batch = make_batch([(5, 9, [3, 1, 2])] * (TAIL_TOKENS + 1))
    assert graphs.forward_tail(batch) is None
    assert graphs.forward_tail(make_batch([(1, 13, [0, 1, 2, 3])])) is None
    assert model.sizes == []
