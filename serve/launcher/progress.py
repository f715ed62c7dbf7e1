"""Loading progress on the terminal: a bar on a tty, a few log lines elsewhere."""

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

LINES_A_PHASE = 4


class ProgressReporter:
    """Sums progress over the ranks of a phase and shows it. Totals are in whatever unit the phase counts."""

    def __init__(self, on_terminal: bool | None = None) -> None:
        self._on_terminal = sys.stderr.isatty() if on_terminal is None else on_terminal
        self._phases: dict[str, dict[str, tuple[int, int]]] = {}
        self._shown: dict[str, int] = {}
        self._bar: Any = None
        self._bar_phase = ""

    def update(self, source: str, phase: str, done: int, total: int) -> None:
        """`source` (a process) has done `done` of `total` of `phase`."""
        parts = self._phases.setdefault(phase, {})
        parts[source] = (done, total)
        all_done = sum(part[0] for part in parts.values())
        all_total = sum(part[1] for part in parts.values())
        if self._on_terminal:
            self._draw(phase, all_done, all_total)
        else:
            self._log(phase, all_done, all_total)

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, phase: str, done: int, total: int) -> None:
        if self._bar is None or self._bar_phase != phase:
            from tqdm import tqdm  # only on a terminal

            self.close()
            self._bar = tqdm(desc=phase, unit="", unit_scale=True, leave=False, file=sys.stderr)
            self._bar_phase = phase
        self._bar.total = total
        self._bar.n = done
        self._bar.refresh()

    def _log(self, phase: str, done: int, total: int) -> None:
        reached = LINES_A_PHASE if total <= 0 else LINES_A_PHASE * done // total
        if reached > self._shown.get(phase, 0):
            self._shown[phase] = reached
            logger.info("%s: %d%%", phase, 100 * reached // LINES_A_PHASE)
