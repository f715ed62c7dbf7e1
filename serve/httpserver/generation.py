"""One HTTP request on its way through the engine: its sequences, and the deltas that wait for its client."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serve.httpserver.errors import ApiError, ClientGoneError, overloaded, unavailable
from serve.httpserver.sequence import Delta, Sequence, TextRules
from serve.types import CacheTier, SamplingParams


@dataclass(frozen=True)
class GenerationSpec:
    """What to generate: `n` sequences for each prompt, in the order prompt 0 choice 0, prompt 0 choice 1, ...

    prompts: uint32 [num_prompt] each. sampling: choice i runs with seed + i.
    """

    request_id: str
    prompts: list[np.ndarray]
    sampling: SamplingParams
    n: int = 1
    rules: TextRules = field(default_factory=TextRules)
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class UsageCount:
    """Tokens of a request; each prompt counts once. cached: by `CacheTier`."""

    num_prompt: int
    num_completion: int
    cached: tuple[int, ...]


class Generation:
    """The sequences of one request and the queue to its one consumer.

    The service pushes deltas or fails it; the consumer takes batches with `next_deltas` until `is_complete`, then the
    service's `close` must be called whatever happened.
    """

    def __init__(
        self, spec: GenerationSpec, sequences: list[Sequence], on_abort: Callable[["Generation"], None]
    ) -> None:
        self.spec = spec
        self.sequences = sequences
        self.slots: list[int] = []
        self._on_abort = on_abort
        self._num_open = len(sequences)
        self._deltas: deque[Delta] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def is_complete(self) -> bool:
        """All sequences have ended and all deltas were taken."""
        return self._num_open == 0 and not self._deltas

    @property
    def is_finished(self) -> bool:
        """Nothing more will be pushed."""
        return self._num_open == 0 or self._failure is not None

    def push(self, delta: Delta) -> None:
        """Give the consumer a delta."""
        self._deltas.append(delta)
        if delta.ending is not None:
            self._num_open -= 1
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the request with an error, after the deltas already there."""
        if self._failure is None and self._num_open:
            self._failure = error
            self._wake()

    def abort(self) -> None:
        """The client has gone: stop the engine's work on it now."""
        if not self.is_finished:
            self._on_abort(self)
        self._deltas.clear()
        self.fail(ClientGoneError())

    async def next_deltas(self) -> list[Delta]:
        """All deltas that are there; waits for a first one. Raises ApiError or ClientGoneError if it failed."""
        while not self._deltas:
            if self._failure is not None:
                raise self._failure
            await self._wait()
        taken = list(self._deltas)
        self._deltas.clear()
        return taken

    async def wait_started(self, timeout_s: float) -> None:
        """Until there is a first delta, or for `timeout_s`. Raises what `next_deltas` would."""
        if not self._deltas and self._failure is None:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._wake)
            try:
                await self._wait()
            finally:
                timer.cancel()
        if not self._deltas and self._failure is not None:
            raise self._failure

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def usage(self) -> UsageCount:
        """Counts so far."""
        cached = [0] * len(CacheTier)
        for sequence in self.sequences[:: self.spec.n]:
            for tier, count in enumerate(sequence.cached_tokens or ()):
                cached[tier] += count
        num_completion = sum(sequence.num_tokens for sequence in self.sequences)
        return UsageCount(sum(len(prompt) for prompt in self.spec.prompts), num_completion, tuple(cached))


def failure_of(message: str | None, status: int) -> ApiError:
    """The error that an output's `error` and `error_code` mean for a client."""
    text = message or "the engine ended the request"
    if status == 429:
        return overloaded(text)
    if status == 503:
        return unavailable(text)
    return ApiError(status if 400 <= status <= 599 else 500, text)
