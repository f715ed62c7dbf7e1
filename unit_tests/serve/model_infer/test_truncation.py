"""Drawing against a brute-force sort of the whole vocabulary in float64."""

import numpy as np
import pytest
import torch

from serve.model_infer.rng import draw_keys, exponentials, exponentials_batched
from serve.model_infer.row_draw import DrawRules, RowDrawer
from serve.model_infer.truncation import TruncationParams, choose, draw_full, draw_truncated, top_candidates

# Rounding may decide between two tokens whose races end this close to each other.
NEAR = 1e-4


def brute_force(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn, best first, and their weights."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    weights = np.where(weights >= min_p - 1e-12, weights, 0)
    if top_k:
        weights[top_k:] = 0
    before = np.cumsum(weights) - weights
    keep = (before < top_p * weights.sum()) | (top_p >= 1)
    keep[0] = True
    weights = np.where(keep, weights, 0)
    return order[weights > 0], weights[weights > 0]


def winners(ids: np.ndarray, weights: np.ndarray, key: int) -> set[int]:
    """The id with the largest logit and Gumbel noise, and those that rounding could put before it."""
    scores = np.log(weights) - np.log(exponentials(key, ids))
    return set(ids[scores >= scores.max() - NEAR].tolist())


def make_keys(count: int, position: int = 0) -> np.ndarray:
    return draw_keys(np.arange(count, dtype=np.uint64), np.full(count, position))


def on_device(keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(keys.view(np.int64))


def parts_of(rules: list[tuple[int, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(part) for part in zip(*rules, strict=True)]


def params_of(rules: list[tuple[int, float, float]]) -> TruncationParams:
    return TruncationParams(*parts_of(rules))


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
    keys = make_keys(len(RULES))
    drawn = draw_truncated(logits, logits.amax(dim=-1), on_device(keys), params_of(RULES)).tolist()
    for row, rule in enumerate(RULES):
        ids, weights = brute_force(logits[row].numpy(), *rule)
        assert drawn[row] in winners(ids, weights, int(keys[row])), rule


@pytest.mark.parametrize("vocab_size", [3, 255, 256, 257, 49152])
def test_full_draws_are_those_of_one_row(vocab_size: int):
    logits, keys = make_logits(64, vocab_size, 2.0), make_keys(64, 3)
    drawn = draw_full(logits, logits.amax(dim=-1), on_device(keys)).tolist()
    drawer = RowDrawer(vocab_size)
    rows = logits.numpy()
    assert drawn == [
        drawer.draw(row, float(row.max()), DrawRules(1.0), key) for row, key in zip(rows, keys.tolist(), strict=True)
    ]


def test_masked_tokens_are_never_drawn():
    logits = torch.zeros(200, 300)
    logits[:, ::3] = -torch.inf
    keys = on_device(make_keys(200))
    for drawn in (
        draw_full(logits, logits.amax(dim=-1), keys),
        draw_truncated(logits, logits.amax(dim=-1), keys, params_of([(0, 0.99999, 0.0)] * 200)),
    ):
        assert (drawn % 3 != 0).all()


def test_a_choice_never_has_weight_zero():
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]], dtype=torch.float64).expand(100, -1)
    index = choose(weights, exponentials_batched(on_device(make_keys(100)), torch.arange(5)))
    assert set(index.tolist()) == {1, 3}


@pytest.mark.parametrize("draws_truncated", [False, True])
def test_frequencies_are_the_probabilities(draws_truncated: bool):
    """Chi-square over 30,000 positions of one seed: 29 degrees of freedom, 99.9 % are below 58.3."""
    count = 30_000
    logits = make_logits(1, 30, 1.0).expand(count, -1).contiguous()
    maxima = logits.amax(dim=-1)
    keys = on_device(draw_keys(np.full(count, 7, dtype=np.uint64), np.arange(count)))
    if draws_truncated:
        drawn = draw_truncated(logits, maxima, keys, params_of([(30, 1.0, 0.0)]).take(torch.zeros(count).long()))
    else:
        drawn = draw_full(logits, maxima, keys)
    expected = logits[0].double().softmax(dim=-1) * count
    observed = torch.bincount(drawn, minlength=30)
    assert float(((observed - expected) ** 2 / expected).sum()) < 58.3


@pytest.mark.parametrize("rule", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.95, 0.0)])
def test_only_near_ties_change_when_logits_differ_by_their_rounding(rule: tuple[int, float, float]):
    logits = make_logits(1000, 5000, 2.5)
    other = logits + (torch.rand(logits.shape, generator=torch.Generator().manual_seed(9)) - 0.5) * 2e-3
    keys = on_device(make_keys(1000))
    drawn = [draw_truncated(each, each.amax(dim=-1), keys, params_of([rule] * 1000)) for each in (logits, other)]
    assert int((drawn[0] == drawn[1]).sum()) >= 990


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
    logits, keys = make_logits(20, 49152, 3.0).round(), make_keys(20, 1)
    drawn = draw_truncated(logits, logits.amax(dim=-1), on_device(keys), params_of([rule] * 20)).tolist()
    for row in range(20):
        ids, weights = brute_force(logits[row].numpy(), *rule)
        assert drawn[row] in winners(ids, weights, int(keys[row]))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [None, (50, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.95, 0.02)])
def test_a_gpu_draws_what_the_cpu_draws(rule: tuple[int, float, float] | None):
    """But for near ties, since the two round exp and log differently."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits, keys = make_logits(256, 49152, 2.5), on_device(make_keys(256, 4))
    drawn = []
    for device in ("cpu", "cuda"):
        rows, numbers = logits.to(device), keys.to(device)
        if rule is None:
            drawn.append(draw_full(rows, rows.amax(dim=-1), numbers).cpu())
        else:
            params = TruncationParams(*(part.to(device) for part in parts_of([rule] * 256)))
            drawn.append(draw_truncated(rows, rows.amax(dim=-1), numbers, params).cpu())
    assert int((drawn[0] == drawn[1]).sum()) >= 255


@pytest.mark.gpu
def test_a_draw_from_the_whole_vocabulary_does_not_wait_for_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits, keys = make_logits(64, 49152, 2.5).cuda(), on_device(make_keys(64)).cuda()
    maxima = logits.amax(dim=-1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = draw_full(logits, maxima, keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.shape == (64,)
