"""Drawing from one row against a brute-force sort of the whole vocabulary."""

import numpy as np
import pytest

from serve.model_infer.rng import uniforms
from serve.model_infer.row_draw import DrawRules, RowDrawer, inverse_cdf, largest


def brute_force(logits: np.ndarray, rules: DrawRules) -> dict[int, float]:
    """Probabilities by id of what may be drawn."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / rules.temperature)
    weights = np.where(weights >= rules.min_p * (1 - 1e-9), weights, 0)
    if rules.top_k:
        weights[rules.top_k :] = 0
    keep = (np.cumsum(weights) - weights < rules.top_p * weights.sum()) | (rules.top_p >= 1)
    keep[0] = True
    weights = np.where(keep, weights, 0)
    return {int(i): w / weights.sum() for i, w in zip(order, weights, strict=True) if w > 0}


def make_logits(vocab_size: int, spread: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])  # a nucleus of nearly all tokens, of hundreds, of a few
@pytest.mark.parametrize("vocab_size", [3, 100, 5003, 49152])
@pytest.mark.parametrize(
    "rules",
    [
        DrawRules(1.0, top_k=1),
        DrawRules(0.7, top_k=5),
        DrawRules(1.0, top_k=50, top_p=0.9),
        DrawRules(1.3, top_p=0.9),
        DrawRules(1.0, top_p=0.3),
        DrawRules(1.0, top_p=0.0),
        DrawRules(2.0, top_p=0.999, min_p=0.01),
        DrawRules(1.0, min_p=0.1),
        DrawRules(1.0, min_p=1.0),
        DrawRules(1.0, top_k=300, top_p=0.97, min_p=0.001),
        DrawRules(1.0, top_k=10_000, top_p=0.99),
        DrawRules(1.0, top_k=10_000),
    ],
    ids=str,
)
def test_the_rules_leave_what_a_full_sort_leaves(vocab_size: int, spread: float, rules: DrawRules):
    logits = make_logits(vocab_size, spread)
    expected = brute_force(logits, rules)
    ids, weights = RowDrawer(vocab_size).kept(logits, float(logits.max()), rules)
    found = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    assert len(found) == len(ids)
    # Rounding may move the end of a nucleus by tokens of next to no mass.
    assert sum(expected.get(i, 0) for i in set(expected) - set(found)) < 1e-5
    assert sum(found[i] for i in set(found) - set(expected)) < 1e-5
    both = sorted(set(found) & set(expected))
    np.testing.assert_allclose([found[i] for i in both], [expected[i] for i in both], rtol=2e-4)


@pytest.mark.parametrize(
    "rules", [DrawRules(1.0, top_k=40), DrawRules(1.0, top_p=0.8), DrawRules(1.0, top_k=1)], ids=str
)
def test_equal_logits_are_cut_by_id(rules: DrawRules):
    logits = make_logits(49152, 2.0).round()
    ids, _ = RowDrawer(49152).kept(logits, float(logits.max()), rules)
    expected = brute_force(logits, rules)
    assert sum(expected[i] for i in set(expected) ^ set(ids.tolist()) if i in expected) < 1e-4
    if rules.top_k:
        assert set(ids.tolist()) == set(expected)


@pytest.mark.parametrize("vocab_size", [3, 255, 256, 257, 49152])
def test_full_draws_follow_the_cumulative_distribution(vocab_size: int):
    drawer = RowDrawer(vocab_size)
    numbers = uniforms(np.arange(50, dtype=np.uint64), np.zeros(50, dtype=np.int64))
    for seed, number in enumerate(numbers):
        logits = make_logits(vocab_size, 2.0, seed)
        cumulative = np.exp(logits.astype(np.float64) - logits.max()).cumsum()
        cumulative /= cumulative[-1]
        drawn = drawer.draw(logits, float(logits.max()), DrawRules(1.0), float(number))
        if np.abs(cumulative - number).min() > 1e-5:
            assert drawn == np.searchsorted(cumulative, number, side="right")


@pytest.mark.parametrize(
    "rules", [DrawRules(1.0), DrawRules(1.0, top_k=25), DrawRules(1.0, top_p=0.9), DrawRules(2.0, min_p=0.05)], ids=str
)
def test_frequencies_are_the_probabilities(rules: DrawRules):
    """Chi-square over 20,000 positions of one seed; fewer than 30 degrees of freedom: 99.9 % are below 60."""
    count = 20_000
    logits = make_logits(30, 1.0)
    drawer = RowDrawer(30)
    numbers = uniforms(np.full(count, 7, dtype=np.uint64), np.arange(count))
    drawn = [drawer.draw(logits, float(logits.max()), rules, float(number)) for number in numbers]
    observed = np.bincount(drawn, minlength=30)
    expected = brute_force(logits, rules)
    assert set(np.flatnonzero(observed)) <= set(expected)
    assert sum((observed[i] - p * count) ** 2 / (p * count) for i, p in expected.items()) < 60


@pytest.mark.parametrize("rules", [DrawRules(1.0), DrawRules(1.0, top_p=0.99999), DrawRules(1.0, top_k=200)], ids=str)
def test_masked_tokens_are_never_drawn(rules: DrawRules):
    logits = np.zeros(300, dtype=np.float32)
    logits[::3] = -np.inf
    drawer = RowDrawer(300)
    assert all(drawer.draw(logits, 0.0, rules, u) % 3 for u in np.linspace(0, 1 - 2**-53, 200))


def test_a_draw_never_has_weight_zero():
    weights = np.array([0.0, 1.0, 0.0, 2.0, 0.0])
    draws = [inverse_cdf(weights, u) for u in (0.0, 1 / 3, 0.34, 1 - 2**-53)]
    assert [index for index, _ in draws] == [1, 3, 3, 3]
    assert all(0 <= rest <= 1 for _, rest in draws)


@pytest.mark.parametrize("count", [1, 20, 128, 3000])
def test_the_largest_come_sorted_with_equals_by_id(count: int):
    logits = (make_logits(49152, 3.0) * 4).round() / 4
    expected = np.lexsort((np.arange(49152), -logits))[:count]
    assert largest(logits, count).tolist() == expected.tolist()
