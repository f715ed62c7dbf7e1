"""Compressed entries made chunk by chunk against the softmax over whole windows."""

import pytest
import torch

from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import assert_close
from unit_tests.kernels.torch_ops.builders import STEPS, runs_of, step_of

BACKEND = ReferenceBackend()
DIM = 6


def by_definition(values, gates, ratio, has_overlap):
    """Entries [n, D] of the finished windows of one sequence."""
    entries = []
    for window in range(len(values) // ratio):
        now = slice(window * ratio, (window + 1) * ratio)
        rows, weights = [values[now, -DIM:]], [gates[now, -DIM:]]
        if has_overlap and window:
            before = slice((window - 1) * ratio, window * ratio)
            rows.append(values[before, :DIM])
            weights.append(gates[before, :DIM])
        shares = torch.cat(weights).double().softmax(0)
        entries.append((shares * torch.cat(rows).double()).sum(0))
    return entries


class Compressor:
    """States of four sequences, two layers."""

    def __init__(self, ratio, has_overlap):
        self.ratio = ratio
        self.state = torch.zeros(8, 2, 3, DIM)
        self.ahead = torch.zeros(8, 2, 3, DIM) if has_overlap else None

    def run(self, values, gates, pages, batch):
        ahead = None if self.ahead is None else self.ahead[:, 1]
        return BACKEND.compress(values, gates, self.ratio, self.state[:, 1], ahead, pages, batch)


@pytest.mark.parametrize("has_overlap", [False, True])
@pytest.mark.parametrize("ratio", [4, 16])
@pytest.mark.parametrize("step", STEPS)
def test_finished_entries_are_softmax_means_of_their_windows(generator, step, ratio, has_overlap):
    contexts, counts = STEPS[step]
    width = 2 * DIM if has_overlap else DIM
    texts = [torch.randn(2, length, width, generator=generator) * 4 for length in contexts]
    compressor, pages = Compressor(ratio, has_overlap), torch.tensor([5, 2, 7, 0][: len(contexts)])
    firsts = [length - count for length, count in zip(contexts, counts, strict=True)]
    for sequence, (text, first) in enumerate(zip(texts, firsts, strict=True)):
        if first:
            batch = step_of(generator, [first], [first])
            compressor.run(*text[:, :first], pages[sequence : sequence + 1], batch)
    batch = step_of(generator, contexts, counts)
    packed = torch.cat([text[:, first:] for text, first in zip(texts, firsts, strict=True)], dim=1)
    out = compressor.run(*packed, pages, batch)
    num_checked = 0
    for text, first, found in zip(texts, firsts, runs_of(batch, out), strict=True):
        for window, expected in enumerate(by_definition(*text, ratio, has_overlap)):
            last = (window + 1) * ratio - 1
            if last >= first:
                assert_close(found[last - first], expected)
                num_checked += 1
    assert num_checked == sum(length // ratio - first // ratio for length, first in zip(contexts, firsts, strict=True))


def test_at_the_end_of_a_window_only_the_overlap_is_left(generator):
    for has_overlap in (False, True):
        for chunks in ([16], [13, 3], [5] + [1] * 11):
            compressor, start = Compressor(4, has_overlap), 0
            for count in chunks:
                start += count
                width = 2 * DIM if has_overlap else DIM
                values, gates = torch.randn(2, count, width, generator=generator)
                compressor.run(values, gates, torch.tensor([3]), step_of(generator, [start], [count]))
            assert bool(compressor.state.any()) == has_overlap
            assert compressor.ahead is None or not compressor.ahead.any()


def test_gates_of_any_size_do_not_overflow(generator):
    for size in (-1e4, 1e4):
        values, gates = torch.randn(9, DIM, generator=generator), torch.full((9, DIM), size)
        compressor = Compressor(4, False)
        out = compressor.run(values, gates, torch.tensor([0]), step_of(generator, [9], [9]))
        assert_close(out[3], values[:4].mean(0), 1e-4)
        one = step_of(generator, [10], [1])
        assert compressor.run(values[:1], gates[:1], torch.tensor([0]), one).isfinite().all()
