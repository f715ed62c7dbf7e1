"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopPattern:
    """A stop string and its failure function (Knuth, Morris, Pratt): fallback[k] is the longest border of text[:k]."""

    text: str
    fallback: tuple[int, ...]


def compile_stops(stops: Sequence[str]) -> list[StopPattern]:
    """Patterns of non-empty strings, without repetitions."""
    return [StopPattern(text, _failure_function(text)) for text in dict.fromkeys(stops)]


def _failure_function(text: str) -> tuple[int, ...]:
    fallback, border = [0, 0], 0
    for character in text[1:]:
        while border and character != text[border]:
            border = fallback[border]
        border += character == text[border]
        fallback.append(border)
    return tuple(fallback)


class StopScanner:
    """Finds the stop string that is complete first, whatever pieces the text comes in, and holds back what may be one.

    Of several that are complete at the same character the longest counts: its text is cut off, or kept when
    `include_stop`. After a match `stopped` is set and nothing more comes out.
    """

    def __init__(self, patterns: Sequence[StopPattern], include_stop: bool) -> None:
        self._patterns = patterns
        self._include_stop = include_stop
        self._matched = [0] * len(patterns)
        self._held = ""
        self.stopped = False
        self.stop_text: str | None = None

    def feed(self, text: str) -> str:
        """Text that certainly belongs to the output."""
        if not self._patterns or self.stopped:
            return "" if self.stopped else text
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = self._advance(character)
            if complete is not None:
                return self._stop(pending[:position], complete)
        keep = max(self._matched)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text held back, when the sequence ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> StopPattern | None:
        complete: StopPattern | None = None
        for index, pattern in enumerate(self._patterns):
            length = self._matched[index]
            while length and character != pattern.text[length]:
                length = pattern.fallback[length]
            length += character == pattern.text[length]
            self._matched[index] = length
            if length == len(pattern.text) and (complete is None or length > len(complete.text)):
                complete = pattern
        return complete

    def _stop(self, pending: str, pattern: StopPattern) -> str:
        self.stopped, self.stop_text, self._held = True, pattern.text, ""
        return pending if self._include_stop else pending[: len(pending) - len(pattern.text)]
