"""One request as the router sees it: where it stands, what is known and scheduled of it, what it holds."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serve.router.found import Found
from serve.router.holding import Holding
from serve.router.ledger import PrefixMatch
from serve.types import FinishReason, RequestStatus, SamplingParams

_S = RequestStatus

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.QUEUED: frozenset({_S.LOOKING_UP, _S.LOADING, _S.PREFILLING, _S.DRAINING}),
    _S.LOOKING_UP: frozenset({_S.QUEUED, _S.DRAINING}),
    _S.LOADING: frozenset({_S.QUEUED, _S.PREFILLING, _S.PREEMPTED, _S.DRAINING}),
    _S.PREFILLING: frozenset({_S.DECODING, _S.PREEMPTED, _S.DRAINING}),
    _S.DECODING: frozenset({_S.PREEMPTED, _S.DRAINING}),
    _S.PREEMPTED: frozenset({_S.LOOKING_UP, _S.LOADING, _S.PREFILLING, _S.DRAINING}),
    _S.DRAINING: frozenset({_S.RELEASED}),
    _S.RELEASED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A move that the table of transitions does not have."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What names a request in messages."""

    slot: int
    generation: int


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Counts are in tokens, intervals are [0, count).

    num_tokens: tokens whose ids are known: the prompt and what was accepted since.
    num_known: tokens known when it joined the batch; prefilling ends there.
    num_scheduled: tokens whose computation is in a plan that was sent; may be ahead of num_tokens by run-ahead.
    num_published: leading pages that the prefix index has been told about (its own or another's copy).
    limit: most tokens that it may ever have. milestone: value of num_scheduled at which decoding needs attention.
    last_step: last plan that computes it; it is out of flight once that plan has ended.
    growth: by group, pages that admission still expects it to ask for while it runs.
    checkpoints_due: boundaries, in tokens and ascending, where its prefill is to keep its state.
    is_flushed: what it has was made before a flush, and is not to be found.
    refreshed: the boundary whose state is in the page that decoding refreshes, 0: none.
    num_scored, num_scored_here: prompt log-probabilities passed on at all, and computed since it joined.
    match, match_version: its last match with the index, and of which version of it.
    held_since, held_tokens: since when it waits for another's prefill, and the tokens whose prefill time it may wait.
    num_verified: leading tokens whose plans have ended well.
    found: what the cache manager has of it, None when that is nothing or does not matter any more.
    is_load_refused: recomputing it was predicted to be done earlier. load_attempts: how often loading it was tried.
    load_cap: most pages to try next. load_wait_until: it lets others
    have the load path until then rather than recompute.
    stored, num_offered: by group, the set of pages that the host has as far as is known; leading pages offered to it.
    """

    key: RequestKey
    server: int
    request_id: str
    priority: int
    order: int
    arrival: float
    clock: Callable[[], float]
    sampling: SamplingParams
    num_prompt: int
    limit: int
    tokens: np.ndarray
    root: bytes
    names: list[bytes]
    stop_ids: frozenset[int] = frozenset()
    num_tokens: int = 0
    num_known: int = 0
    num_scheduled: int = 0
    num_published: int = 0
    milestone: int = 0
    last_step: int = -1
    growth: dict[str, int] = field(default_factory=dict)
    checkpoints_due: list[int] = field(default_factory=list)
    refreshed: int = 0
    is_flushed: bool = False
    row: int | None = None
    holding: Holding | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: list[int] | None = None
    has_output: bool = False
    num_preemptions: int = 0
    num_scored: int = 0
    num_scored_here: int = 0
    match: PrefixMatch | None = None
    match_version: int = -1
    held_since: float | None = None
    held_tokens: int = 0
    num_verified: int = 0
    found: Found | None = None
    is_load_refused: bool = False
    load_attempts: int = 0
    load_cap: int | None = None
    load_wait_until: float = 0.0
    stored: dict[str, int] = field(default_factory=dict)
    num_offered: int = 0
    entered: dict[RequestStatus, float] = field(default_factory=dict)
    _status: RequestStatus = RequestStatus.QUEUED

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt
        self.num_known = self.num_prompt
        self.entered[self._status] = self.arrival

    @property
    def status(self) -> RequestStatus:
        """Where it stands; see `advance`."""
        return self._status

    def advance(self, to: RequestStatus) -> None:
        """Move to a status that `TRANSITIONS` allows and stamp the time; raises IllegalTransitionError on any other."""
        if to not in TRANSITIONS[self._status]:
            raise IllegalTransitionError(f"{self.request_id}: {self._status.value} -> {to.value}")
        self._status = to
        self.entered[to] = self.clock()

    @property
    def sort_key(self) -> tuple[int, int]:
        """Place in line: lower priority values first, then order of arrival."""
        return self.priority, self.order

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def is_ended(self) -> bool:
        """True once its last output was made."""
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Such a request computes its whole prompt."""
        return self.sampling.prompt_logprobs is not None

    def count_cached(self, by_tier: list[int]) -> None:
        """Remember what its first admission did not have to compute; later admissions do not change it."""
        if self.cached_tokens is None:
            self.cached_tokens = by_tier
