import pytest

from serve.model_infer.phases import PhaseClock


def test_phases_are_timed_in_order_even_when_they_fail():
    clock = PhaseClock()
    with clock.phase("load"):
        pass
    with pytest.raises(ZeroDivisionError), clock.phase("allocate"):
        1 / 0
    assert list(clock.seconds) == ["load", "allocate"]
    assert all(seconds >= 0 for seconds in clock.seconds.values())
