"""Who may enter at all, and how much of the pool a request is expected to need."""

import math
from dataclasses import dataclass

from serve.router.request import Request


@dataclass(frozen=True)
class AdmissionLimits:
    """max_total_len: prompt + output tokens that fit both the model and the pool. max_queue_size: waiting at most."""

    max_total_len: int
    max_queue_size: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request is not taken: one line and the HTTP status that fits it."""

    error: str
    code: int


class OutputEstimate:
    """The share of `max_tokens` that requests really generate: measured, and raised after each preemption."""

    _WEIGHT = 0.05
    _LOWEST = 0.05

    def __init__(self, start: float = 0.5) -> None:
        self.fraction = start

    def finished(self, num_generated: int, max_tokens: int) -> None:
        """Learn from a request that ended by itself."""
        self.fraction += self._WEIGHT * (num_generated / max(1, max_tokens) - self.fraction)
        self.fraction = max(self._LOWEST, min(1.0, self.fraction))

    def preempted(self) -> None:
        """The pool ran out: expect half of what was not expected too."""
        self.fraction = (1.0 + self.fraction) / 2


class Admission:
    """Checks at the door, and expected peaks for the scheduler.

    Room is promised for what is expected, not for the worst case, so the pool stays full. A request that was
    preempted once is let in again only with room for all it may ever need: it is not thrown out twice in a row.
    """

    def __init__(self, limits: AdmissionLimits, page_size: int) -> None:
        self.limits = limits
        self.estimate = OutputEstimate()
        self._page_size = page_size

    def refuse(self, num_prompt: int, num_waiting: int, num_free_rows: int) -> Refusal | None:
        """Why a new request cannot be taken. Requests that a free row awaits do not count as waiting."""
        if num_prompt < 1:
            return Refusal("the prompt is empty", 400)
        if num_prompt + 1 > self.limits.max_total_len:
            longest = self.limits.max_total_len - 1
            return Refusal(f"the prompt has {num_prompt} tokens, at most {longest} fit", 400)
        if num_waiting >= self.limits.max_queue_size + num_free_rows:
            return Refusal("too many requests are waiting", 429)
        return None

    def total_limit(self, num_prompt: int, max_tokens: int) -> int:
        """Tokens that a request may have in all."""
        return min(num_prompt + max(1, max_tokens), self.limits.max_total_len)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the states of `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def expected_growth(self, request: Request) -> int:
        """Pages that a waiting request will ask for beyond those of its known tokens. The last token has no state."""
        left = request.limit - request.num_tokens
        if not request.num_preemptions:
            left = min(left, math.ceil(left * self.estimate.fraction))
        return self.pages_for(max(request.num_tokens, request.num_tokens + left - 1)) - self.pages_for(
            request.num_tokens
        )
