"""Drawing from one row against a brute-force sort of the whole vocabulary."""

import numpy as np
import pytest

from serve.model_infer.rng import draw_keys, exponentials
from serve.model_infer.row_draw import DrawRules, RowDrawer, choose, largest


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


@pytest.mark.parametrize(
    "rules", [DrawRules(1.0), DrawRules(1.0, top_k=25), DrawRules(1.0, top_p=0.9), DrawRules(2.0, min_p=0.05)], ids=str
)
def test_frequencies_are_the_probabilities(rules: DrawRules):
    """Chi-square over 20,000 positions of one seed; fewer than 30 degrees of freedom: 99.9 % are below 60."""
    logits = make_logits(30, 1.0)
    expected = brute_force(logits, rules)
    assert chi_square(draw_often(logits, rules, 20_000), expected) < 60


def test_frequencies_of_many_blocks_are_the_probabilities():
    """2,000 tokens lie in 8 blocks. 30 groups of ids: the choice of a block and that within it both count."""
    logits = make_logits(2000, 2.0)
    drawn = draw_often(logits, DrawRules(0.8), 20_000)
    by_token = brute_force(logits, DrawRules(0.8))
    expected = {group: sum(p for i, p in by_token.items() if i % 30 == group) for group in range(30)}
    assert chi_square([token % 30 for token in drawn], expected) < 60
    expected = {block: sum(p for i, p in by_token.items() if i // 256 == block) for block in range(8)}
    assert chi_square([token // 256 for token in drawn], expected) < 25  # 7 degrees of freedom: 99.9 % are below 24.3


def draw_often(logits: np.ndarray, rules: DrawRules, count: int) -> list[int]:
    """A token of each position of one seed."""
    drawer = RowDrawer(len(logits))
    keys = draw_keys(np.full(count, 7, dtype=np.uint64), np.arange(count)).tolist()
    return [drawer.draw(logits, float(logits.max()), rules, key) for key in keys]


def chi_square(drawn: list[int], expected: dict[int, float]) -> float:
    """Of observed counts against probabilities; nothing else may have been drawn."""
    assert set(drawn) <= set(expected)
    observed = np.bincount(drawn, minlength=max(expected) + 1)
    return sum((observed[i] - p * len(drawn)) ** 2 / (p * len(drawn)) for i, p in expected.items())


@pytest.mark.parametrize(
    "rules",
    [DrawRules(0.9), DrawRules(0.9, top_k=50), DrawRules(0.9, top_p=0.95), DrawRules(1.5, min_p=0.02)],
    ids=str,
)
def test_only_near_ties_change_when_logits_differ_by_their_rounding(rules: DrawRules):
    """Two tokens change places where their race ends closer than the disturbance: in about one draw of 1,000."""
    drawer, rng = RowDrawer(5000), np.random.default_rng(1)
    keys = draw_keys(np.full(3000, 11, dtype=np.uint64), np.arange(3000)).tolist()
    num_equal = 0
    for position, key in enumerate(keys):
        logits = make_logits(5000, 2.5, position % 50)
        other = logits + rng.uniform(-1e-3, 1e-3, len(logits)).astype(np.float32)
        first, second = (drawer.draw(row, float(row.max()), rules, key) for row in (logits, other))
        num_equal += first == second
    assert num_equal >= 0.995 * len(keys)


def test_a_truncated_draw_takes_the_token_of_the_largest_logit_and_noise():
    """The definition of the Gumbel-max trick, term by term."""
    logits, rules = make_logits(4000, 2.0), DrawRules(0.7, top_k=60)
    drawer, order = RowDrawer(4000), np.argsort(-logits)[:60]
    for key in draw_keys(np.arange(40, dtype=np.uint64), np.full(40, 5)).tolist():
        gumbel = -np.log(exponentials(key, order))
        expected = order[(logits[order].astype(np.float64) / 0.7 + gumbel).argmax()]
        assert drawer.draw(logits, float(logits.max()), rules, key) == expected


@pytest.mark.parametrize("rules", [DrawRules(1.0), DrawRules(1.0, top_p=0.99999), DrawRules(1.0, top_k=200)], ids=str)
def test_masked_tokens_are_never_drawn(rules: DrawRules):
    logits = np.zeros(300, dtype=np.float32)
    logits[::3] = -np.inf
    assert all(token % 3 for token in draw_often(logits, rules, 200))


def test_a_choice_never_has_weight_zero_and_does_not_depend_on_the_order():
    weights, ids = np.array([0.0, 1.0, 0.0, 2.0, 1e-300]), np.array([4, 9, 2, 7, 5])
    for key in range(100):
        index = choose(weights, exponentials(key, ids))
        assert weights[index] > 0
        assert ids[::-1][choose(weights[::-1], exponentials(key, ids[::-1]))] == ids[index]


@pytest.mark.parametrize("count", [1, 20, 128, 3000])
def test_the_largest_come_sorted_with_equals_by_id(count: int):
    logits = (make_logits(49152, 3.0) * 4).round() / 4
    expected = np.lexsort((np.arange(49152), -logits))[:count]
    assert largest(logits, count).tolist() == expected.tolist()
