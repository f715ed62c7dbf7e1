"""The request table: bodies of requests in shared memory, one slot a request.

Writers: the HTTP process that owns the slot until it submits it, then the router (generated tokens, `released`).
Workers and the cache manager only read. There is no lock; see docs/architecture.md for the two counters.
"""

from dataclasses import dataclass

import numpy as np

from serve.types import SamplingParams

SAMPLING_BYTES = 16 * 1024


@dataclass(frozen=True)
class TableShape:
    """Sizes that all processes agree on."""

    num_slots: int
    max_tokens: int
    page_size: int


class RequestTable:
    """All slots of one server. Create in the launcher, attach everywhere else."""

    @classmethod
    def create(cls, shape: TableShape) -> "RequestTable":
        """Make the memfd segment and stamp its header. `fd` is then inherited by children."""
        raise NotImplementedError

    @classmethod
    def attach(cls, fd: int) -> "RequestTable":
        """Map a segment that exists; raises SegmentError unless magic, version and size are right. Never writes."""
        raise NotImplementedError

    shape: TableShape
    fd: int

    def generation(self, slot: int) -> int:
        """Generation of the request that fills, or last filled, the slot."""
        raise NotImplementedError

    def is_free(self, slot: int) -> bool:
        """True when nothing names the slot's last request any more."""
        raise NotImplementedError

    def fill(
        self, slot: int, prompt: np.ndarray, sampling: SamplingParams, root: bytes, names: list[bytes]
    ) -> int:
        """HTTP: write a request (prompt uint32 [num_prompt], names of its full pages) and bump the generation, which is returned.

        Raises ValueError when prompt or sampling parameters do not fit.
        """
        raise NotImplementedError

    def mark_released(self, slot: int, generation: int) -> None:
        """Router: nothing names this request any more."""
        raise NotImplementedError

    def release_all(self) -> None:
        """Router, at its start: no request of an earlier epoch lives."""
        raise NotImplementedError

    def num_prompt(self, slot: int) -> int:
        raise NotImplementedError

    def tokens(self, slot: int) -> np.ndarray:
        """uint32 [max_tokens] view: the prompt, then generated tokens as the router appends them."""
        raise NotImplementedError

    def sampling(self, slot: int) -> SamplingParams:
        raise NotImplementedError

    def root(self, slot: int) -> bytes:
        """Parent name of the first page."""
        raise NotImplementedError

    def names(self, slot: int) -> list[bytes]:
        """Names of the prompt's full pages."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
