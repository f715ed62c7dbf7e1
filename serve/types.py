"""Enumerations and small value types that more than one process uses."""

from enum import Enum, IntEnum

import msgspec


class RequestStatus(Enum):
    """Where a request stands in the router; moved only by `Request.advance`."""

    QUEUED = "queued"
    LOOKING_UP = "looking_up"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    DRAINING = "draining"
    RELEASED = "released"


class FinishReason(IntEnum):
    """Why a request ended. The wire carries the number."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class PageContent(Enum):
    """What a host slot holds."""

    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"


class Durability(Enum):
    """How safe a host page is from a restart."""

    VOLATILE = "volatile"
    PERSISTING = "persisting"
    DURABLE = "durable"


class JobResult(IntEnum):
    """The one terminal answer of a rank to a job."""

    DONE = 1
    FAILED = 2
    DROPPED = 3
    CANCELLED = 4


class AcquireOutcome(IntEnum):
    """What became of an Acquire.

    GRANTED: pinned. MISSING: some objects are not there; a shorter prefix may be. BUSY: the host tier cannot pin or
    promote as much now (or serves nobody yet, after its restart). STALE: the request is gone from its slot.
    """

    GRANTED = 1
    MISSING = 2
    BUSY = 3
    STALE = 4


class CacheTier(IntEnum):
    """Where a cached token came from."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class JobId(msgspec.Struct, frozen=True, array_like=True):
    """Names a load or store job; unique over engine restarts."""

    epoch: int
    counter: int


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to choose tokens for one request. Validated by the HTTP server; every other process trusts it.

    temperature 0 is greedy; top_k 0 and top_p 1 are off; seed None draws one per request at submission (the HTTP server
    resolves it, so that the field is always set when a worker reads it). logprobs: number of top alternatives,
    None when no logprobs are wanted, 0 for the chosen token's only. prompt_logprobs likewise, for echo.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
