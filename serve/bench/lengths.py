"""Token counts that are fixed or drawn from a range."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator


@dataclass(frozen=True)
class LengthRange:
    """Uniform over [low, high], both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def parse_length(value: object) -> LengthRange:
    """`512`, or `128:1024` for a range; ValueError when it is neither or not positive."""
    if isinstance(value, LengthRange):
        return value
    low, _, high = str(value).partition(":")
    if not low.isdecimal() or (high and not high.isdecimal()):
        raise ValueError("should be a number of tokens, or LOW:HIGH")
    length = LengthRange(int(low), int(high or low))
    if not 1 <= length.low <= length.high:
        raise ValueError("should be at least 1, low before high")
    return length


Length = Annotated[LengthRange, BeforeValidator(parse_length)]
