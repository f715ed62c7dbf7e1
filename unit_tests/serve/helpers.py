"""What tests of several parts of `serve` need."""

import time
from collections.abc import Callable
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """With the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def falls_idle(cpu_s: Callable[[], float], most_s: float) -> bool:
    """Some stretch of 0.3 s costs at most `most_s` by this clock: in others a collection of garbage may happen."""
    for _ in range(20):
        before = cpu_s()
        time.sleep(0.3)
        if cpu_s() - before <= most_s:
            return True
    return False
