import numpy as np
import pytest

from serve.bench.lengths import LengthRange, parse_length


def test_a_number_and_a_range_are_read() -> None:
    assert parse_length(512) == parse_length("512") == LengthRange(512, 512)
    assert parse_length("1:8") == LengthRange(1, 8)
    assert (str(parse_length("5")), str(parse_length("1:8"))) == ("5", "1:8")


def test_draws_cover_the_range_with_both_ends() -> None:
    rng = np.random.default_rng(0)
    assert {LengthRange(2, 4).draw(rng) for _ in range(100)} == {2, 3, 4}


@pytest.mark.parametrize("text", ["", "0", "-3", "8:1", "a", "1:b", "1.5", None])
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_length(text)
