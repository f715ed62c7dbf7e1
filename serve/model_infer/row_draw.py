"""Drawing a token from one row of logits with numpy: what `truncation.py` does, for the CPU.

numpy's exp, max and comparisons are vectorised and a row fits the second-level cache, so a row at a time on one thread
beats whole-batch tensor operations that wake every core of a busy machine. A result cannot depend on other rows.

A draw is a race (`choose`), not a search in a cumulative sum: there the rounding of any logit moves all tokens behind
it, and one seed gives another text in another batch. In a race only two tokens that nearly tie can change places.
"""

from dataclasses import dataclass

import numpy as np

from serve.model_infer.rng import exponentials

BLOCK = 256  # tokens of a block in a draw from the whole vocabulary
FIRST_BLOCK_ID = 1 << 40  # block i has random numbers of its own, those of id FIRST_BLOCK_ID + i
_GROUP = 32  # logits that share one maximum in the search for the largest
_NARROW = 128  # a nucleus mostly has fewer tokens
_SORTED_AT_MOST = 4096  # a larger nucleus is found by a histogram


@dataclass(frozen=True)
class DrawRules:
    """temperature > 0; top_k 0, top_p 1 and min_p 0 are off. Order of the rules: min_p, top_k, top_p (as vLLM)."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class RowDrawer:
    """Draws tokens; keeps the work memory of one row. One thread."""

    def __init__(self, vocab_size: int) -> None:
        self._padded = np.zeros(-(-vocab_size // BLOCK) * BLOCK, dtype=np.float32)
        self._weights = self._padded[:vocab_size]
        self._blocks = self._padded.reshape(-1, BLOCK)
        self._noise_ids = np.concatenate([FIRST_BLOCK_ID + np.arange(len(self._blocks)), np.arange(BLOCK)])

    def draw(self, logits: np.ndarray, maximum: float, rules: DrawRules, key: int) -> int:
        """Token id drawn from logits float32 [V], whose finite maximum is known; key: see `rng.draw_keys`."""
        if not rules.truncates:
            return self._draw_full(logits, maximum, rules.temperature, key)
        ids, weights = self.kept(logits, maximum, rules)
        return int(ids[choose(weights, exponentials(key, ids))])

    def kept(self, logits: np.ndarray, maximum: float, rules: DrawRules) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [N] that the rules leave and their weights float64 [N] (probabilities up to a factor)."""
        if rules.top_k == 0 and rules.min_p == 0.0:
            ids, weights, mass = self._nucleus_candidates(logits, maximum, rules)
        else:
            ids, weights = _cut_by_rank(logits, maximum, rules)
            mass = float(weights.sum())
        if rules.top_p >= 1.0:
            return ids, weights
        return _nucleus(ids, weights, rules.top_p * mass)

    def _draw_full(self, logits: np.ndarray, maximum: float, temperature: float, key: int) -> int:
        """A race of blocks, then one within the block that won: random numbers for some hundred ids, not for all.

        The places within a block have the same noise in each: only one of the blocks is looked into.
        """
        noise, num_blocks = exponentials(key, self._noise_ids), len(self._blocks)
        block = choose(self._block_sums(logits, maximum, temperature), noise[:num_blocks])
        return block * BLOCK + choose(self._blocks[block].astype(np.float64), noise[num_blocks:])

    def _block_sums(self, logits: np.ndarray, maximum: float, temperature: float) -> np.ndarray:
        """Fill the weights exp((logit - maximum) / temperature); their sums by block, float64."""
        np.subtract(logits, np.float32(maximum), out=self._weights)
        if temperature != 1.0:
            np.divide(self._weights, np.float32(temperature), out=self._weights)
        np.exp(self._weights, out=self._weights)
        sums: np.ndarray = np.einsum("ij->i", self._blocks)  # twice as fast as sum(axis=1)
        return sums.astype(np.float64)

    def _nucleus_candidates(
        self, logits: np.ndarray, maximum: float, rules: DrawRules
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Ids that surely hold the top_p nucleus, in rising order, their weights, and the whole row's mass."""
        mass = float(self._block_sums(logits, maximum, rules.temperature).sum())
        ids = np.flatnonzero(logits >= _rank_bound(logits, _NARROW))
        weights = self._weights[ids].astype(np.float64)
        if weights.sum() < rules.top_p * mass:
            # All tokens lighter than this together weigh less than what the nucleus leaves out.
            lightest = (1.0 - rules.top_p) * mass / len(logits)
            ids = np.flatnonzero(self._weights >= np.float32(0.999 * lightest))
            weights = self._weights[ids].astype(np.float64)
        return ids, weights, mass


def choose(weights: np.ndarray, noise: np.ndarray) -> int:
    """Index drawn in proportion to weights float64 [N] >= 0, of which one is positive; noise [N]: `rng.exponentials`.

    Gumbel-max trick: the largest log(weight) + Gumbel noise, which is the largest weight / exponential noise.
    """
    return int((weights / noise).argmax())


def largest(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest of logits [V], best first, equal ones by id. count <= V."""
    ids = np.flatnonzero(logits >= _rank_bound(logits, count))
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]


def _rank_bound(logits: np.ndarray, count: int) -> float:
    """A value that at least `count` logits reach, and not many more: the count-th largest maximum of groups."""
    size = len(logits)
    if count >= size:
        return -np.inf
    stride = size // _GROUP
    if count > stride // 2:
        return float(np.partition(logits, size - count)[size - count])
    maxima = logits[: stride * _GROUP].reshape(_GROUP, stride).max(axis=0)
    return float(np.partition(maxima, stride - count)[stride - count])


def _cut_by_rank(logits: np.ndarray, maximum: float, rules: DrawRules) -> tuple[np.ndarray, np.ndarray]:
    """What min_p and top_k leave: ids and weights."""
    bound = -np.inf
    if rules.min_p > 0.0:
        bound = maximum + rules.temperature * float(np.log(rules.min_p))
    if rules.top_k > 0:
        bound = max(bound, _rank_bound(logits, rules.top_k))
    ids = np.flatnonzero(logits >= np.float32(bound))
    values = logits[ids]
    if 0 < rules.top_k < len(ids):
        order = np.argsort(-values, kind="stable")[: rules.top_k]
        ids, values = ids[order], values[order]
    return ids, np.exp((values.astype(np.float64) - maximum) / rules.temperature)


def _nucleus(ids: np.ndarray, weights: np.ndarray, target: float) -> tuple[np.ndarray, np.ndarray]:
    """The smallest set of heaviest tokens whose mass reaches `target`, at least one."""
    if len(ids) <= _SORTED_AT_MOST:
        return _sorted_nucleus(ids, weights, target)
    # Buckets of equal leading bits of float32 sort by weight; only the bucket in which the target falls is sorted.
    buckets = weights.astype(np.float32).view(np.uint32) >> np.uint32(16)
    lowest = int(buckets.min())
    masses = np.bincount((buckets - np.uint32(lowest)).astype(np.int64), weights=weights)
    from_top = masses[::-1].cumsum()
    place = min(int(from_top.searchsorted(target)), len(masses) - 1)
    edge = lowest + len(masses) - 1 - place
    above, within = np.flatnonzero(buckets > edge), np.flatnonzero(buckets == edge)
    mass_above = float(from_top[place - 1]) if place else 0.0
    edge_ids, edge_weights = _sorted_nucleus(ids[within], weights[within], target - mass_above)
    return np.concatenate([ids[above], edge_ids]), np.concatenate([weights[above], edge_weights])


def _sorted_nucleus(ids: np.ndarray, weights: np.ndarray, target: float) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-weights, kind="stable")
    ids, weights = ids[order], weights[order]
    count = max(1, int((weights.cumsum() - weights < target).sum()))
    return ids[:count], weights[:count]
