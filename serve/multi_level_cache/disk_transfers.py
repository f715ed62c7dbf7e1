"""Bytes of objects on their way to and from segment files, on threads of their own.

A read goes straight into the host's slot where the slot is aligned; objects that lie one behind the other are read by
one request. What the disk gives is compared with its checksums where it lies, before anybody is told.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from serve.multi_level_cache.disk_committer import CommitStore
from serve.multi_level_cache.disk_io import ALIGNMENT, IoPool, SegmentFile
from serve.multi_level_cache.disk_space import DiskObject
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import Bytes, Checksums, LoadRequest, StoreRequest, TransferOutcome

LOAD, STORE = 0, 1
MAX_COALESCED_BYTES = 2 << 20  # larger requests are no faster, and leave other threads without work

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """A transfer has ended on its thread; a store that went well is with the committer instead."""

    ticket: TierTicket
    target: DiskObject
    outcome: TransferOutcome
    is_load: bool
    error: str = ""


@dataclass(frozen=True)
class Read:
    """One object to be read. slot_bytes: what it takes on disk."""

    request: LoadRequest
    target: DiskObject
    file: SegmentFile
    slot_bytes: int

    @property
    def offset(self) -> int:
        return self.target.slot * self.slot_bytes

    @property
    def is_direct(self) -> bool:
        """The disk can write into the view itself."""
        if len(self.request.views) > 1 or len(self.request.views[0]) != self.slot_bytes:
            return False
        return int(self.request.views[0].__array_interface__["data"][0]) % ALIGNMENT == 0

    def is_continued_by(self, other: "Read") -> bool:
        """The other lies right behind it."""
        return other.file is self.file and other.offset == self.offset + self.slot_bytes


class ReadQueue:
    """Reads in order of their submission, taken in runs. Thread-safe."""

    def __init__(self) -> None:
        self._reads: deque[Read] = deque()
        self._lock = threading.Lock()

    def put(self, read: Read) -> None:
        """Comes last."""
        with self._lock:
            self._reads.append(read)

    def take(self, most_bytes: int = MAX_COALESCED_BYTES) -> list[Read]:
        """The first read, with those behind it that continue it and go straight into their slots; maybe none."""
        with self._lock:
            if not self._reads:
                return []
            run = [self._reads.popleft()]
            left = most_bytes - run[0].slot_bytes
            while run[0].is_direct and self._reads and self._continues(run[-1], self._reads[0], left):
                run.append(self._reads.popleft())
                left -= run[-1].slot_bytes
            return run

    @staticmethod
    def _continues(last: Read, following: Read, left: int) -> bool:
        return following.slot_bytes <= left and last.is_continued_by(following) and following.is_direct


class DiskTransfers:
    """Reads before writes. tell: hears of every transfer, but for stores that go to `commit`; both from any thread."""

    def __init__(self, pool: IoPool, tell: Callable[[Moved], None], commit: Callable[[CommitStore], None]) -> None:
        self._pool = pool
        self._tell = tell
        self._commit = commit
        self._reads = ReadQueue()

    # --- stores ----------------------------------------------------------------------------------------------------

    def submit_write(self, request: StoreRequest, target: DiskObject, file: SegmentFile, slot_bytes: int) -> None:
        """Begin to write an object into its slot."""
        self._pool.submit(
            STORE,
            lambda buffer: self._write(request, target, file, buffer[:slot_bytes]),
            lambda: self._tell(Moved(request.ticket, target, TransferOutcome.REFUSED, is_load=False)),
        )

    def _write(self, request: StoreRequest, target: DiskObject, file: SegmentFile, buffer: Bytes) -> None:
        """On an I/O thread: check, write, and hand over to the committer."""
        np.concatenate(request.views, out=buffer[: request.form.object_bytes])
        buffer[request.form.object_bytes :] = 0
        try:
            if not _matches(request.form, request.key, buffer, request.checksums):
                self._tell(Moved(request.ticket, target, TransferOutcome.CORRUPT, is_load=False))
                return
            file.write(buffer, target.slot * len(buffer))
        except OSError as error:
            self._tell(Moved(request.ticket, target, TransferOutcome.FAILED, is_load=False, error=str(error)))
            return
        self._commit(CommitStore(request.ticket, target, file))

    # --- loads -----------------------------------------------------------------------------------------------------

    def submit_read(self, read: Read) -> None:
        """Begin to read an object."""
        self._reads.put(read)
        self._pool.submit(LOAD, self._read_some, self._refuse_one)

    def _refuse_one(self) -> None:
        for read in self._reads.take(most_bytes=0):
            self._tell(Moved(read.request.ticket, read.target, TransferOutcome.REFUSED, is_load=True))

    def _read_some(self, buffer: Bytes) -> None:
        """On an I/O thread. As many calls come as there are reads, so that a run leaves some with nothing to do."""
        run = self._reads.take()
        is_read = len(run) > 1 and self._read_run(run)
        for read in run:
            self._tell(self._end(read, buffer, is_read))

    def _read_run(self, run: list[Read]) -> bool:
        """By one request; False when it failed, since maybe not all of them have to."""
        try:
            run[0].file.read([read.request.views[0] for read in run], run[0].offset)
        except Exception:  # read one by one, each tells what is wrong
            return False
        return True

    def _end(self, read: Read, buffer: Bytes, is_read: bool) -> Moved:
        """Read what is not read yet, compare, and copy what does not lie in its views. Never raises."""
        data = read.request.views[0] if read.is_direct else buffer[: read.slot_bytes]
        outcome, error = TransferOutcome.FAILED, ""
        try:
            if not is_read:
                read.file.read([data], read.offset)
            outcome = _take_in(read, data)
        except OSError as caught:
            error = str(caught)
        except Exception as caught:  # each read of a run has its own answer
            logger.exception("disk cache: a read is given up")
            error = f"{type(caught).__name__}: {caught}"
        return Moved(read.request.ticket, read.target, outcome, is_load=True, error=error)

    # --- threads ---------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Transfers that no thread has begun."""
        return self._pool.num_queued

    def num_hung(self, timeout_s: float) -> int:
        """Transfers that have run for longer than `timeout_s`."""
        return self._pool.num_hung(timeout_s)

    def refuse_queued(self) -> None:
        """Give up what no thread has begun."""
        self._pool.refuse_queued()

    def close(self, timeout_s: float) -> bool:
        """Carry out what is queued, then end the threads; False when one is still busy after `timeout_s`."""
        return self._pool.close(timeout_s)


def _take_in(read: Read, data: Bytes) -> TransferOutcome:
    """Compare, then copy into the views what does not lie in them already."""
    request, start = read.request, 0
    if not _matches(request.form, request.key, data, read.target.checksums):
        return TransferOutcome.CORRUPT
    for view in request.views if data is not request.views[0] else ():
        view[:] = data[start : start + len(view)]
        start += len(view)
    return TransferOutcome.DONE


def _matches(form: ObjectFormat, key: PageKey, data: Bytes, checksums: Checksums) -> bool:
    """Are these the bytes that the checksums were made of, for this page and group?"""
    seeds = unit_seeds([key.name], form.group_index, form.unit_bytes)[0]
    return bool((object_checksums(data, form.unit_bytes, seeds) == checksums).all())
