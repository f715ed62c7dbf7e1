"""The contract of a tier below the host: the disk, later a remote store.

Objects are immutable: a key's bytes never change, so storing a key that is there is a success without work.

The caller (the cache manager) guarantees
- all methods are called on one thread, the manager's, and never concurrently;
- every ticket is used once; views stay valid and, for a store, unchanged until the ticket's result was polled;
- objects given to one `submit_store` belong to the boundary of one page name.

The implementation must
- never block in any method but `close`: bytes move on threads of its own, `contains` answers from memory;
- give every submitted ticket exactly one result by `poll_finished`, also when it fails, is refused or turned off; after
  that it touches the views no more. A read or write that never returns keeps its ticket (and so the slots) until it
  does: deadlines end waiting, never the use of bytes;
- verify checksums of what it read before it says DONE, and of what it is given before it writes (CORRUPT otherwise);
- treat errors as results, count them, and stop admission instead of failing (`can_accept` False);
- publish an object to `contains` only when a load of it can succeed.
- not publish a store that was in progress when its key or root was evicted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey, TierTicket

Bytes = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint64]


class TransferOutcome(Enum):
    """How a transfer ended.

    FAILED: an I/O error. REFUSED: not tried (no room, too much in flight, turned off). MISSING: the object is not there
    (any more). CORRUPT: bytes that do not match their checksums: those read (the tier has dropped the object), or those
    to be stored (the caller drops its page).
    """

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    MISSING = "missing"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class StoreRequest:
    """Copy one object down. views: its slots in order, `form.object_bytes` in all. checksums: [num_units]."""

    ticket: TierTicket
    key: PageKey
    parent: bytes
    root: bytes
    form: ObjectFormat
    views: Sequence[Bytes]
    checksums: Checksums


@dataclass(frozen=True)
class LoadRequest:
    """Copy one object up into `views`, its slots in order."""

    ticket: TierTicket
    key: PageKey
    form: ObjectFormat
    views: Sequence[Bytes]


@dataclass(frozen=True)
class TransferResult:
    """The one result of a ticket. checksums: of a load that is DONE, [num_units]."""

    ticket: TierTicket
    outcome: TransferOutcome
    checksums: Checksums = field(default_factory=lambda: np.empty(0, dtype=np.uint64))


@dataclass(frozen=True)
class TierCapacity:
    """Bytes and objects; `off_reason` says why the tier has turned itself off."""

    total_bytes: int
    used_bytes: int
    num_objects: int
    off_reason: str | None = None


class SecondaryTier(ABC):
    """A tier below the host; see the module's text for the contract."""

    name: str

    @abstractmethod
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which objects a load would find, from memory."""

    @abstractmethod
    def touch(self, keys: Sequence[PageKey]) -> None:
        """These objects were of use now: for the tier's own LRU."""

    @abstractmethod
    def can_accept(self, num_bytes: int) -> bool:
        """Would a store of so many bytes be tried now?"""

    @abstractmethod
    def submit_store(self, request: StoreRequest) -> None:
        """Begin to copy an object down; a result follows."""

    @abstractmethod
    def submit_load(self, request: LoadRequest) -> None:
        """Begin to copy an object up; a result follows. Loads go before stores."""

    @abstractmethod
    def poll_finished(self) -> list[TransferResult]:
        """Results since the last call."""

    @abstractmethod
    def poll_evicted(self) -> list[PageKey]:
        """Objects that the tier has dropped by itself since the last call."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when `poll_finished` or `poll_evicted` has something."""

    @abstractmethod
    def evict(self, keys: Sequence[PageKey]) -> None:
        """Drop these objects; transfers in progress end by their results."""

    @abstractmethod
    def evict_root(self, root: bytes | None) -> None:
        """Drop all objects under a root; all objects of all roots for None."""

    @abstractmethod
    def capacity(self) -> TierCapacity:
        """How full the tier is."""

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Counters as plain data."""

    def check_integrity(self) -> list[str]:
        """What is wrong with the tier's own books, one line each."""
        return []

    def num_leaving(self) -> int:
        """Evicted objects that a restart could still bring back; 0 once all of them are durably gone."""
        return 0

    @abstractmethod
    def tick(self) -> None:
        """Called once a second or more often: housekeeping that is not bound to a call."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Finish what is in flight, as far as it ends in time, and let go of everything."""
