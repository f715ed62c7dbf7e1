"""What the disk tier makes of trouble: nothing is stored for a while, one line a minute, off when nothing helps."""

import logging
from collections import Counter
from collections.abc import Callable

PAUSE_AFTER_ERROR_S = 60.0

logger = logging.getLogger(__name__)


class DiskHealth:
    """Counts errors, and says whether stores may be tried. off_reason: set once, for good."""

    def __init__(self, counts: Counter[str], clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock
        self._paused_until = 0.0
        self._warned_at = float("-inf")
        self._told_of_damage_at = float("-inf")
        self.off_reason: str | None = None

    @property
    def is_paused(self) -> bool:
        """An error happened lately."""
        return self._clock() < self._paused_until

    def resume(self) -> None:
        """Forget the last error."""
        self._paused_until = 0.0

    def on_error(self, line: str) -> None:
        """Stop admission for a while; one line a minute."""
        self._counts["errors"] += 1
        now = self._clock()
        self._paused_until = now + PAUSE_AFTER_ERROR_S
        if now - self._warned_at >= PAUSE_AFTER_ERROR_S:
            self._warned_at = now
            logger.warning("disk cache: %s; nothing is stored for %d s", line, PAUSE_AFTER_ERROR_S)

    def on_damage(self, segment: int) -> None:
        """A miss that is counted; one line a minute, as what damages one page may damage many."""
        now = self._clock()
        if now - self._told_of_damage_at >= PAUSE_AFTER_ERROR_S:
            self._told_of_damage_at = now
            logger.warning("disk cache: a damaged page in segment %d is a miss; it is deleted", segment)

    def turn_off(self, reason: str) -> None:
        """Serve nothing until the next start."""
        if self.off_reason is None:
            self.off_reason = reason
            self._counts["errors"] += 1
            logger.error("disk cache: off, because %s", reason)
