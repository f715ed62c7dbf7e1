"""When requests are sent."""

from enum import Enum

import numpy as np


class Arrival(Enum):
    """How arrivals are spread. CLOSED_LOOP sends the next when one of `concurrency` has ended."""

    ALL_AT_ONCE = "all_at_once"
    FIXED = "fixed"
    POISSON = "poisson"
    CLOSED_LOOP = "closed_loop"
    TRACE = "trace"


def arrival_offsets(arrival: Arrival, count: int, rate: float, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which each of `count` conversations begins, in order; the first is at 0.

    rate: conversations a second, used by FIXED and POISSON. TRACE has its own times and is not asked for here.
    """
    if arrival in (Arrival.ALL_AT_ONCE, Arrival.CLOSED_LOOP):
        return [0.0] * count
    if arrival is Arrival.FIXED:
        return [i / rate for i in range(count)]
    if arrival is Arrival.POISSON:
        gaps = rng.exponential(1.0 / rate, size=max(count - 1, 0))
        return [0.0, *np.cumsum(gaps).tolist()][:count]
    raise ValueError(f"{arrival} has its own times")
