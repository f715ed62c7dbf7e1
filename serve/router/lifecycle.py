"""Living requests, and all the ways in which one ends."""

from typing import Protocol

import numpy as np

from serve.router.cache_client import CacheClient
from serve.router.engine import Engine
from serve.router.outputs import Outputs
from serve.router.request import Request, RequestKey
from serve.router.statistics import RouterStatistics
from serve.types import FinishReason, RequestStatus, SamplingParams


class Table(Protocol):
    """What the router needs of the request table."""

    @property
    def num_slots(self) -> int: ...
    def generation(self, slot: int) -> int: ...
    def is_free(self, slot: int) -> bool: ...
    def num_prompt(self, slot: int) -> int: ...
    def tokens(self, slot: int) -> np.ndarray: ...
    def sampling(self, slot: int) -> SamplingParams: ...
    def root(self, slot: int) -> bytes: ...
    def names(self, slot: int) -> list[bytes]: ...
    def mark_released(self, slot: int, generation: int) -> None: ...


class Lifecycle:
    """Whatever ends a request, at whatever status: one last output, and all that it holds comes back.

    Its pages and its slot come back when no plan names it any more (DRAINING until then). Jobs hold their pages by
    themselves, and nothing waits for them.
    """

    def __init__(
        self, page_size: int, table: Table, cache: CacheClient, outputs: Outputs, statistics: RouterStatistics
    ) -> None:
        self.requests: dict[int, Request] = {}  # by slot
        self.engine: Engine | None = None
        self._page_size = page_size
        self._table = table
        self._cache = cache
        self._outputs = outputs
        self._statistics = statistics
        self._draining: list[Request] = []

    def get(self, key: RequestKey) -> Request | None:
        """The living request of that slot and generation."""
        request = self.requests.get(key.slot)
        return request if request is not None and request.key == key else None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """It ended by itself, and its last output is made already."""
        assert self.engine is not None
        self.engine.admission.estimate.finished(request.num_generated, request.limit - request.num_prompt)
        self._retire(request, reason)

    def fail(self, request: Request, error: str, code: int = 500) -> None:
        """End with an error; the state that it made is not to be trusted."""
        if self.engine is not None:
            first = (request.cached_tokens or [0])[0] // self._page_size
            self.engine.planner.forget_pages(request, first, even_if_shared=True)
        self.end(request, FinishReason.ERROR, error, code, is_trusted=False)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        code: int = 500,
        is_heard: bool = True,
        is_trusted: bool = True,
    ) -> None:
        """End a request wherever it stands, with its last output; nothing when it has ended."""
        if request.is_ended:
            return
        if is_heard:
            output = self._outputs.add(request, [], reason)
            output.error, output.error_code = error, code
        self._retire(request, reason, is_trusted)

    def _retire(self, request: Request, reason: FinishReason, is_trusted: bool = True) -> None:
        assert self.engine is not None
        request.finish_reason = reason
        self._cache.cancel(request)
        self.engine.tiers.ended(request, is_trusted, request.clock())
        self.engine.queue.discard(request)
        self.engine.planner.depart(request)
        request.advance(RequestStatus.DRAINING)
        self._draining.append(request)
        self._statistics.finished[reason] += 1
        self._statistics.request_s.observe(request.entered[RequestStatus.DRAINING] - request.arrival)

    def release_drained(self) -> None:
        """Release what nothing names any more."""
        if not self._draining or self.engine is None:
            return
        waiting = []
        for request in self._draining:
            if self.engine.planner.is_in_flight(request):
                waiting.append(request)
            else:
                self._release(self.engine, request)
        self._draining = waiting

    def _release(self, engine: Engine, request: Request) -> None:
        place = engine.planner.give_up_pages(request)
        if place is not None:
            engine.tiers.checkpointed(request, place, request.clock())
        request.advance(RequestStatus.RELEASED)
        del self.requests[request.key.slot]
        self.release_slot(request.server, request.key)

    def release_slot(self, server: int, key: RequestKey) -> None:
        """The slot's owner may use it again."""
        self._table.mark_released(key.slot, key.generation)
        self._outputs.released(server, key)
