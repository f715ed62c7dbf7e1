"""The causal convolution with states by segment against torch's over the whole sequence."""

import pytest
import torch
import torch.nn.functional as F

from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import assert_close
from unit_tests.kernels.torch_ops.builders import STEPS, runs_of, step_of

BACKEND = ReferenceBackend()
HEADS, WIDTHS, KERNEL = 2, (3, 5), 4


def whole(x, weight):
    """x [t, C] from the start of a sequence -> [t, C]."""
    padded = F.pad(x.T, (KERNEL - 1, 0))
    return F.silu(F.conv1d(padded[None], weight[:, None], groups=weight.shape[0])[0].T)


@pytest.mark.parametrize("step", STEPS)
def test_a_chunk_after_others_is_the_end_of_the_whole(generator, step):
    contexts, counts = STEPS[step]
    channels = HEADS * sum(WIDTHS)
    weight = torch.randn(channels, KERNEL, generator=generator)
    pages = torch.tensor([5, 2, 7, 0][: len(contexts)])
    states = tuple(torch.zeros(8, HEADS, 3, width, KERNEL - 1) for width in WIDTHS)
    views = tuple(state[:, :, 1] for state in states)
    texts = [torch.randn(length, channels, generator=generator) for length in contexts]
    firsts = [length - count for length, count in zip(contexts, counts, strict=True)]
    for sequence, (text, first) in enumerate(zip(texts, firsts, strict=True)):
        if first:
            batch = step_of(generator, [first], [first])
            BACKEND.causal_conv(text[:first], weight, views, pages[sequence : sequence + 1], batch)
    batch = step_of(generator, contexts, counts)
    packed = torch.cat([text[first:] for text, first in zip(texts, firsts, strict=True)])
    out = BACKEND.causal_conv(packed, weight, views, pages, batch)
    for sequence, (text, found) in enumerate(zip(texts, runs_of(batch, out), strict=True)):
        assert_close(found, whole(text, weight)[-len(found) :])
        last = F.pad(text.T, (KERNEL, 0))[:, -(KERNEL - 1) :]
        held = [state[pages[sequence], :, 1].flatten(0, 1) for state in states]
        assert torch.equal(torch.cat(held), last)


def test_only_the_named_pages_and_the_layer_change(generator):
    batch = step_of(generator, [3], [3])
    state = torch.full((4, HEADS, 2, 3, KERNEL - 1), 9.0)
    x, weight = torch.randn(3, HEADS * 3, generator=generator), torch.randn(HEADS * 3, KERNEL, generator=generator)
    BACKEND.causal_conv(x, weight, (state[:, :, 0],), torch.tensor([2]), batch)
    assert (state[[0, 1, 3]] == 9).all()
    assert (state[:, :, 1] == 9).all()
    assert (state[2, :, 0] != 9).all()
