"""Random numbers of sampling: a function of (seed, position, token id) and of nothing else.

A counter-based generator, so that a token does not depend on which rows share its batch, on earlier draws, or on a
preemption in between. SplitMix64 (Steele, Lea and Flood 2014) mixes the seed, then the position, then the id. numpy and
torch give the same bits.
"""

import numpy as np
import torch

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_FRACTION_BITS = 52  # with half a step added, a number of so many bits is neither 0 nor 1
_STEP = 2.0**-_FRACTION_BITS


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """seeds uint64 [N], positions int64 [N] -> uint64 [N]: what all random numbers of a draw come from."""
    return _mix(_mix(seeds) + positions.astype(np.uint64) * np.uint64(_GAMMA))


def exponentials(key: int, ids: np.ndarray) -> np.ndarray:
    """float64 [N] > 0, of the exponential distribution of rate 1, for ids int64 [N] under the key of a draw."""
    bits = _mix(ids.astype(np.uint64) * np.uint64(_GAMMA) + np.uint64(key))
    numbers = (bits >> np.uint64(64 - _FRACTION_BITS)).astype(np.float64)
    exponential: np.ndarray = -np.log((numbers + 0.5) * _STEP)
    return exponential


def exponentials_batched(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same on any device: keys int64 [R] (bits of uint64), ids int64 [R, N] or [N] -> float64 [R, N]."""
    state = ids * _signed(_GAMMA) + keys[:, None] + _signed(_GAMMA)
    for shift, multiplier in _MULTIPLIERS:
        state = (state ^ _shift_right(state, shift)) * _signed(multiplier)
    bits = state ^ _shift_right(state, _LAST_SHIFT)
    return -torch.log((_shift_right(bits, 64 - _FRACTION_BITS).double() + 0.5) * _STEP)


def _mix(state: np.ndarray) -> np.ndarray:
    """uint64 [N] -> uint64 [N]."""
    state = state + np.uint64(_GAMMA)
    for shift, multiplier in _MULTIPLIERS:
        state ^= state >> np.uint64(shift)
        state *= np.uint64(multiplier)
    state ^= state >> np.uint64(_LAST_SHIFT)
    return state


def _signed(word: int) -> int:
    """The int64 of the same bits: torch does not calculate with uint64, and int64 wraps around in the same way."""
    return word - (1 << 64) if word >> 63 else word


def _shift_right(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64 words."""
    return (words >> count) & ((1 << (64 - count)) - 1)
