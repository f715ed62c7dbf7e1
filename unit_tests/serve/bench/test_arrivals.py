import numpy as np
import pytest

from serve.bench.arrivals import Arrival, arrival_offsets


def offsets(arrival: Arrival, count: int, rate: float, seed: int = 1) -> list[float]:
    return arrival_offsets(arrival, count, rate, np.random.default_rng(seed))


def test_all_at_once_and_closed_loop_are_due_at_the_start() -> None:
    assert offsets(Arrival.ALL_AT_ONCE, 3, 1.0) == offsets(Arrival.CLOSED_LOOP, 3, 1.0) == [0.0, 0.0, 0.0]


def test_fixed_arrivals_are_evenly_spaced() -> None:
    assert offsets(Arrival.FIXED, 4, 2.0) == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    times = np.asarray(offsets(Arrival.POISSON, 20001, 4.0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)


def test_poisson_arrivals_repeat_by_seed() -> None:
    assert offsets(Arrival.POISSON, 9, 4.0, seed=3) == offsets(Arrival.POISSON, 9, 4.0, seed=3)
    assert offsets(Arrival.POISSON, 9, 4.0, seed=3) != offsets(Arrival.POISSON, 9, 4.0, seed=4)


@pytest.mark.parametrize("arrival", [Arrival.FIXED, Arrival.POISSON, Arrival.ALL_AT_ONCE])
@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one_work(arrival: Arrival, count: int) -> None:
    assert offsets(arrival, count, 2.0) == [0.0] * count


def test_a_trace_is_not_asked_for_here() -> None:
    with pytest.raises(ValueError):
        offsets(Arrival.TRACE, 1, 1.0)
