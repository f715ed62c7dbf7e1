"""Random numbers of sampling: a function of (seed, position) and of nothing else.

A counter-based generator, so that a token does not depend on which rows share its batch, on earlier draws, or on a
preemption in between. SplitMix64 (Steele, Lea and Flood 2014) mixes the seed, then the position.
"""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + _GAMMA
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """seeds uint64 [N], positions int64 [N] -> float64 [N] in [0, 1), 53 random bits each."""
    bits = _mix(_mix(seeds) + positions.astype(np.uint64) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
