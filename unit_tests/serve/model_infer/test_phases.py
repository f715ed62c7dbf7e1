from itertools import count
from types import SimpleNamespace

import pytest

from serve.model_infer import phases
from serve.model_infer.phases import PhaseClock


def test_phases_are_timed_in_order_even_when_they_fail(monkeypatch: pytest.MonkeyPatch):
    times = count()  # each look at the clock is a second later
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: float(next(times))))
    clock = PhaseClock()
    with clock.phase("load"):
        next(times)
    with pytest.raises(ZeroDivisionError), clock.phase("allocate"):
        1 / 0
    assert list(clock.seconds.items()) == [("load", 2.0), ("allocate", 1.0)]
