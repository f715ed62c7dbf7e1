"""Drawing against a brute-force sort of the whole vocabulary in float64."""

import numpy as np
import pytest
import torch

from serve.model_infer.rng import uniforms
from serve.model_infer.truncation import TruncationParams, draw, draw_full, draw_truncated, top_candidates

# Within this distance of a step of the CDF rounding may decide.
EDGE = 1e-5


def brute_force(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn, best first, and their cumulative probabilities."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    weights = np.where(weights >= min_p - 1e-12, weights, 0)
    if top_k:
        weights[top_k:] = 0
    before = np.cumsum(weights) - weights
    keep = (before < top_p * weights.sum()) | (top_p >= 1)
    keep[0] = True
    weights = np.where(keep, weights, 0)
    kept = weights > 0
    return order[kept], np.cumsum(weights[kept]) / weights.sum()


def params_of(rules: list[tuple[int, float, float]]) -> TruncationParams:
    top_k, top_p, min_p = zip(*rules, strict=True)
    return TruncationParams(torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


def make_logits(num_rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


RULES = [
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (50, 0.9, 0.0),
    (0, 0.9, 0.0),
    (0, 0.3, 0.0),
    (0, 0.0, 0.0),
    (0, 0.999, 0.01),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (300, 0.97, 0.001),
    (10_000, 0.99, 0.0),
    (10_000, 1.0, 0.0),
]


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])  # a nucleus of nearly all tokens, of hundreds, of a few
@pytest.mark.parametrize("vocab_size", [3, 100, 5003, 49152])
def test_truncated_draws_are_those_of_a_full_sort(vocab_size: int, spread: float):
    logits = make_logits(len(RULES), vocab_size, spread)
    numbers = torch.from_numpy(uniforms(np.arange(len(RULES), dtype=np.uint64), np.zeros(len(RULES), dtype=np.int64)))
    drawn = draw_truncated(logits, logits.amax(dim=-1), numbers, params_of(RULES)).tolist()
    for row, rule in enumerate(RULES):
        ids, cumulative = brute_force(logits[row].numpy(), *rule)
        place = int(np.searchsorted(cumulative, float(numbers[row]), side="right"))
        if np.abs(cumulative - float(numbers[row])).min() > EDGE:
            assert drawn[row] == ids[place], rule
        else:
            assert drawn[row] in ids[max(0, place - 2) : place + 3]


@pytest.mark.parametrize("vocab_size", [3, 255, 256, 257, 49152])
def test_full_draws_follow_the_cumulative_distribution(vocab_size: int):
    logits = make_logits(64, vocab_size, 2.0)
    numbers = torch.from_numpy(uniforms(np.arange(64, dtype=np.uint64), np.zeros(64, dtype=np.int64)))
    drawn = draw_full(logits, logits.amax(dim=-1), numbers).tolist()
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1).numpy()
    for row in range(64):
        number = float(numbers[row])
        if np.abs(cumulative[row] - number).min() > EDGE:
            assert drawn[row] == int(np.searchsorted(cumulative[row], number, side="right"))


def test_masked_tokens_are_never_drawn():
    logits = torch.zeros(200, 300)
    logits[:, ::3] = -torch.inf
    numbers = torch.linspace(0, 1 - 2**-53, 200, dtype=torch.float64)
    for drawn in (
        draw_full(logits, logits.amax(dim=-1), numbers),
        draw_truncated(logits, logits.amax(dim=-1), numbers, params_of([(0, 0.99999, 0.0)] * 200)),
    ):
        assert (drawn % 3 != 0).all()


def test_a_draw_never_has_weight_zero():
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]], dtype=torch.float64).expand(4, -1)
    index, rest = draw(weights, torch.tensor([0.0, 1 / 3, 0.34, 1 - 2**-53], dtype=torch.float64))
    assert index.tolist() == [1, 3, 3, 3]
    assert ((rest >= 0) & (rest <= 1)).all()


@pytest.mark.parametrize("draws_truncated", [False, True])
def test_frequencies_are_the_probabilities(draws_truncated: bool):
    """Chi-square over 30,000 positions of one seed: 29 degrees of freedom, 99.9 % are below 58.3."""
    count = 30_000
    logits = make_logits(1, 30, 1.0).expand(count, -1).contiguous()
    maxima = logits.amax(dim=-1)
    numbers = torch.from_numpy(uniforms(np.full(count, 7, dtype=np.uint64), np.arange(count)))
    if draws_truncated:
        drawn = draw_truncated(logits, maxima, numbers, params_of([(30, 1.0, 0.0)]).take(torch.zeros(count).long()))
    else:
        drawn = draw_full(logits, maxima, numbers)
    expected = logits[0].double().softmax(dim=-1) * count
    observed = torch.bincount(drawn, minlength=30)
    assert float(((observed - expected) ** 2 / expected).sum()) < 58.3


@pytest.mark.parametrize("vocab_size", [64, 4097, 49152])
def test_candidates_are_the_sorted_top_with_equals_by_id(vocab_size: int):
    logits = (make_logits(5, vocab_size, 3.0) * 8).round() / 8  # many equal values
    values, ids, num_certain = top_candidates(logits, 50)
    for row in range(5):
        certain = int(num_certain[row])
        order = np.lexsort((np.arange(vocab_size), -logits[row].numpy()))
        assert ids[row, :certain].tolist() == order[:certain].tolist()
        assert values[row].tolist() == logits[row, ids[row]].tolist()


@pytest.mark.parametrize("rule", [(40, 1.0, 0.0), (0, 0.8, 0.0), (5, 0.5, 0.0)])
def test_many_equal_logits_give_the_draw_of_a_full_sort(rule: tuple[int, float, float]):
    logits = make_logits(20, 49152, 3.0).round()
    numbers = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draw_truncated(logits, logits.amax(dim=-1), numbers, params_of([rule] * 20)).tolist()
    for row in range(20):
        ids, cumulative = brute_force(logits[row].numpy(), *rule)
        if np.abs(cumulative - float(numbers[row])).min() > EDGE:
            assert drawn[row] == ids[int(np.searchsorted(cumulative, float(numbers[row]), side="right"))]
