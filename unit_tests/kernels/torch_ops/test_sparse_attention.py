"""Choosing entries, and attention to a window and entries, against loops over queries."""

import pytest
import torch

from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import assert_close
from unit_tests.kernels.torch_ops.builders import STEPS, spread, step_of

BACKEND = ReferenceBackend()
HEADS, DIM, RATIO, WINDOW = 3, 8, 4, 20


def queries_of(batch, generator, heads=HEADS):
    return torch.randn(batch.positions.shape[0], heads, DIM, generator=generator)


def rows_of(contexts, generator, ratio):
    return [torch.randn(max(1, length // ratio), DIM, generator=generator) for length in contexts]


@pytest.mark.parametrize("count", [3, 5, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_the_entries_with_the_greatest_scores_are_chosen(generator, step, count):
    batch = step_of(generator, *STEPS[step])
    keys = rows_of(STEPS[step][0], generator, RATIO)
    q, weights = queries_of(batch, generator, 7), torch.randn(batch.positions.shape[0], 7, generator=generator)
    chosen, valid = BACKEND.select_entries(q, weights, spread(batch, keys, RATIO), batch, RATIO, count)
    assert chosen.shape == (len(q), min(count, batch.max_context_len // RATIO))
    for token, (sequence, position) in enumerate(
        zip(batch.sequence_ids.tolist(), batch.positions.tolist(), strict=True)
    ):
        finished = (position + 1) // RATIO
        scores = ((q[token] @ keys[sequence][:finished].T).relu() * weights[token, :, None]).sum(0)
        expected = set(scores.topk(min(count, finished)).indices.tolist())
        assert set(chosen[token][valid[token]].tolist()) == expected


def test_of_equal_scores_the_earlier_entry_comes_first(generator):
    batch = step_of(generator, [80], [80])
    keys = spread(batch, [torch.zeros(20, DIM)], RATIO)
    chosen, valid = BACKEND.select_entries(queries_of(batch, generator), torch.ones(80, HEADS), keys, batch, RATIO, 4)
    assert valid[-1].all()
    assert chosen[-1].tolist() == [0, 1, 2, 3]


def by_definition(q, rows, sinks, scale):
    """q [H, D] over rows [s, D] -> [H, D]."""
    scores = torch.cat((q.double() @ rows.double().T * scale, sinks.double()[:, None]), dim=1)
    return scores.softmax(1)[:, :-1] @ rows.double()


@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
@pytest.mark.parametrize("step", STEPS)
def test_window_and_entries_share_one_softmax_with_the_sink(generator, step, kind):
    contexts = STEPS[step][0]
    batch, other = step_of(generator, *STEPS[step]), step_of(generator, *STEPS[step])
    texts, entries = rows_of(contexts, generator, 1), rows_of(contexts, generator, RATIO)
    leaf, q, sinks = spread(batch, texts), queries_of(batch, generator), torch.randn(HEADS, generator=generator)
    more = () if kind == "window" else (spread(other, entries, RATIO), other)
    chosen = None
    if kind == "chosen":
        numbers = (
            torch.randint(0, 1000, (len(q), 5), generator=generator) % ((batch.positions + 1) // RATIO + 1)[:, None]
        )
        chosen = numbers, numbers < ((batch.positions + 1) // RATIO)[:, None]
    out = BACKEND.window_attention(q, leaf, batch, WINDOW, sinks, 0.3, *more, chosen=chosen, ratio=RATIO)
    expected = []
    for token, (sequence, position) in enumerate(
        zip(batch.sequence_ids.tolist(), batch.positions.tolist(), strict=True)
    ):
        rows = [texts[sequence][max(0, position - WINDOW + 1) : position + 1]]
        if kind == "all":
            rows.append(entries[sequence][: (position + 1) // RATIO])
        elif chosen is not None:
            rows.append(entries[sequence][chosen[0][token][chosen[1][token]]])
        expected.append(by_definition(q[token], torch.cat(rows), sinks, 0.3))
    assert_close(out, torch.stack(expected))


def test_rows_below_the_window_are_never_read(generator):
    batch = step_of(generator, [60], [1])
    text = torch.randn(60, DIM, generator=generator)
    q, sinks, leaf = queries_of(batch, generator), torch.zeros(HEADS), spread(batch, [text])
    before = BACKEND.window_attention(q, leaf, batch, WINDOW, sinks, 0.3)
    leaf[batch.page_table[0, :2].long()] = float("nan")
    batch.page_table[0, :2] = 2**30
    assert torch.equal(BACKEND.window_attention(q, leaf, batch, WINDOW, sinks, 0.3), before)
