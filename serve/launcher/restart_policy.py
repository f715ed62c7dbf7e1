"""When, and whether, to start something again that has died."""

from dataclasses import dataclass

MAX_QUICK_FAILURES = 5
WINDOW_S = 600.0
HEALTHY_S = 5.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


@dataclass
class RestartPolicy:
    """Restarts at once after a healthy life, and ever later while lives are short; gives up on a series of those.

    A life is short when it ended within HEALTHY_S of being ready, or before. Times are of one monotonic clock.
    """

    max_quick_failures: int = MAX_QUICK_FAILURES

    def __post_init__(self) -> None:
        self._quick_failures: list[float] = []

    def delay_after(self, ready_at: float | None, ended_at: float) -> float | None:
        """Seconds to wait after this end until the next start; None: give up."""
        if ready_at is not None and ended_at - ready_at >= HEALTHY_S:
            self._quick_failures.clear()
            return 0.0
        recent = [at for at in self._quick_failures if ended_at - at < WINDOW_S]
        self._quick_failures = [*recent, ended_at]
        count = len(self._quick_failures)
        if count >= self.max_quick_failures:
            return None
        # The first failure may be an accident: nobody should wait for that.
        return 0.0 if count == 1 else min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (count - 2))
