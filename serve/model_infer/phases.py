"""How long each part of the start took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds by phase, in the order in which phases end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; also when it raises."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - begun, 3)
