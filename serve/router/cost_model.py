"""What a step and a load cost, measured while serving and decaying to the start-up probe when nothing is measured."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CostPrior:
    """What to believe before anything was measured. Promotions bring pages from disk into the host."""

    prefill_tokens_per_s: float = 2000.0
    decode_step_s: float = 0.03
    load_bytes_per_s: float = 1e9
    promotion_bytes_per_s: float = 3e8


@dataclass(slots=True)
class _Rate:
    """A decaying ratio of two sums. Old samples fade with `half_life_s`; the prior counts as `prior_weight`."""

    top: float = 0.0
    bottom: float = 0.0
    at: float = 0.0

    def add(self, top: float, bottom: float, now: float, half_life_s: float) -> None:
        fade = self._fade(now, half_life_s)
        self.top = self.top * fade + top
        self.bottom = self.bottom * fade + bottom
        self.at = now

    def value(self, prior_top: float, prior_bottom: float, now: float, half_life_s: float) -> float:
        fade = self._fade(now, half_life_s)
        return (self.top * fade + prior_top) / (self.bottom * fade + prior_bottom)

    def _fade(self, now: float, half_life_s: float) -> float:
        return math.exp2(-max(0.0, now - self.at) / half_life_s)


class CostModel:
    """Predicts times of prefill, decode, load and promotion. The caller gives the time; there is no clock here.

    A sample weighs what it measured: tokens over seconds for prefill, seconds over steps for decode. The prior
    weighs as much as `_PRIOR_TOKENS` tokens, `_PRIOR_STEPS` steps or `_PRIOR_BYTES` bytes, so a few real ones outweigh
    it.
    """

    _PRIOR_TOKENS = 32.0
    _PRIOR_STEPS = 1.0
    _PRIOR_BYTES = 4e6
    _LOAD_OVERHEAD_S = 0.002  # messages there and back
    _HALF_LIFE_S = 30.0

    def __init__(self, prior: CostPrior) -> None:
        self._prior = prior
        self._prefill = _Rate()
        self._decode = _Rate()
        self._load = _Rate()
        self._promotion = _Rate()
        self._told_promotion = 0.0

    def observe(self, num_prefill_tokens: int, num_decode_rows: int, compute_s: float, now: float) -> None:
        """Learn from one finished step."""
        if compute_s <= 0.0:
            return
        if num_prefill_tokens == 0:
            if num_decode_rows:
                self._decode.add(compute_s, 1.0, now, self._HALF_LIFE_S)
            return
        decode_s = self.decode_step_s(now) if num_decode_rows else 0.0
        prefill_s = max(compute_s - decode_s, compute_s * 0.1)
        self._prefill.add(num_prefill_tokens, prefill_s, now, self._HALF_LIFE_S)

    def prefill_tokens_per_s(self, now: float) -> float:
        """Prompt tokens computed a second."""
        prior_s = self._PRIOR_TOKENS / self._prior.prefill_tokens_per_s
        return self._prefill.value(self._PRIOR_TOKENS, prior_s, now, self._HALF_LIFE_S)

    def decode_step_s(self, now: float) -> float:
        """Seconds of a step that only decodes."""
        prior_s = self._prior.decode_step_s * self._PRIOR_STEPS
        return self._decode.value(prior_s, self._PRIOR_STEPS, now, self._HALF_LIFE_S)

    def recompute_s(self, num_tokens: int, now: float) -> float:
        """Predicted seconds to prefill `num_tokens`, with the two steps that run-ahead keeps before it."""
        return num_tokens / self.prefill_tokens_per_s(now) + 2 * self.decode_step_s(now)

    def observe_load(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a finished load; `seconds` without the wait for the loads before it."""
        self._load.add(num_bytes, max(seconds, 1e-6), now, self._HALF_LIFE_S)

    def observe_promotion(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a grant that waited for the disk."""
        self._promotion.add(num_bytes, max(seconds, 1e-6), now, self._HALF_LIFE_S)

    def tell_promotion(self, bytes_per_s: float) -> None:
        """What the cache manager has measured of the disk, reads that nobody waited for included; 0: nothing."""
        self._told_promotion = bytes_per_s

    def load_bytes_per_s(self, now: float) -> float:
        """Bytes that come from the host into the device a second."""
        return self._bytes_per_s(self._load, self._prior.load_bytes_per_s, now)

    def promotion_bytes_per_s(self, now: float) -> float:
        """Bytes that come from the disk into the host a second, as told, or else as grants have shown."""
        if self._told_promotion:
            return self._told_promotion
        return self._bytes_per_s(self._promotion, self._prior.promotion_bytes_per_s, now)

    def _bytes_per_s(self, rate: _Rate, prior: float, now: float) -> float:
        return rate.value(self._PRIOR_BYTES, self._PRIOR_BYTES / prior, now, self._HALF_LIFE_S)

    def load_s(self, num_bytes: int, disk_bytes: int, now: float) -> float:
        """Predicted seconds until `num_bytes` are on the device, `disk_bytes` of which are still on disk."""
        promotion_s = disk_bytes / self.promotion_bytes_per_s(now) if disk_bytes else 0.0
        return self._LOAD_OVERHEAD_S + promotion_s + num_bytes / self.load_bytes_per_s(now)
