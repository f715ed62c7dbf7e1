import numpy as np
import pytest
import torch

from serve.model_infer.greedy import greedy_tokens


@pytest.mark.parametrize("vocab_size", [7, 1000, 49152])
def test_the_lowest_id_wins_among_equals(vocab_size: int):
    logits = torch.zeros(3, vocab_size)
    logits[1, [3, 6]] = 2.0
    logits[2, -1] = 1.0
    ids, maxima = greedy_tokens(logits)
    assert ids.tolist() == [0, 3, vocab_size - 1]
    assert maxima.tolist() == [0.0, 2.0, 1.0]


@pytest.mark.parametrize("place", [0, 5, 499, 998, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_in_its_maximum(place: int, value: float):
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    logits[2, place] = value
    logits[3, 1:] = -torch.inf
    _, maxima = greedy_tokens(logits)
    assert torch.isfinite(maxima).tolist() == [True, True, False, True]
