"""The disk tier: objects in segment files, an index in SQLite, hits after a restart.

Threads: the manager's calls all methods and owns all state; I/O threads move bytes; the committer syncs and changes the
index. Order of a store: write, sync, row, findable. Order of an eviction: not findable, row gone, slot free.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve.histogram import Histogram
from serve.ipc.wakeup import Wakeup
from serve.multi_level_cache.disk_adoption import Adoption, AdoptionEnd, FoundObjects, FoundSegments
from serve.multi_level_cache.disk_committer import (
    Adopt,
    Command,
    CommitLastUse,
    CommitRemoval,
    CommitSegmentRemoval,
    CommitStore,
    Committed,
    DiskCommitter,
    Event,
    IndexReplaced,
    IndexUnusable,
)
from serve.multi_level_cache.disk_directory import DirectoryLock
from serve.multi_level_cache.disk_health import DiskHealth
from serve.multi_level_cache.disk_index import DiskIndex
from serve.multi_level_cache.disk_io import IoPool, SegmentFile, aligned
from serve.multi_level_cache.disk_room import DiskOptions, DiskRoom
from serve.multi_level_cache.disk_space import DiskObject
from serve.multi_level_cache.disk_transfers import DiskTransfers, Moved, Read
from serve.multi_level_cache.fault_injector import FaultInjector
from serve.multi_level_cache.faulty_disk import FaultyFile, FaultyIndex
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import (
    Checksums,
    LoadRequest,
    SecondaryTier,
    StoreRequest,
    TierCapacity,
    TransferOutcome,
    TransferResult,
)
from serve.multi_level_cache.statistics import AGE_BOUNDS_S, TransferMeter

LAST_USE_PERIOD_S = 60.0
MAX_HUNG = 2

logger = logging.getLogger(__name__)


class DiskTier(SecondaryTier):
    """One directory. Serves nothing until `serve_namespace`."""

    name = "disk"

    def __init__(
        self,
        options: DiskOptions,
        formats: Sequence[ObjectFormat],
        clock: Callable[[], float] = time.time,
        faults: FaultInjector | None = None,
    ) -> None:
        """Locks the directory and begins to check its index. Raises DiskDirectoryError, OSError."""
        self._options = options
        self._formats = {form.group: form for form in formats}
        self._clock = clock
        self._faults = faults
        self._lock = DirectoryLock(options.directory)
        self._room = DiskRoom(options, self._submit, self._on_evicted, self._open_segment)
        self._space = self._room.space
        self._namespace: bytes | None = None
        self._is_adopted = False
        self._evicted_unseen: list[Callable[[DiskObject], bool]] = []  # of what is not adopted yet
        self._pending: dict[PageKey, DiskObject] = {}  # stores in progress
        self._used: set[DiskObject] = set()
        self._events: queue.SimpleQueue[Moved | Event] = queue.SimpleQueue()
        self._results: list[TransferResult] = []
        self._evicted: list[PageKey] = []
        self._wakeup = Wakeup()
        self._counts: Counter[str] = Counter()
        self._health = DiskHealth(self._counts, clock)
        self._loads, self._stores = TransferMeter(), TransferMeter()
        self._eviction_ages = Histogram(AGE_BOUNDS_S)
        self._flushed_at = clock()
        self._is_closed = False
        pool = IoPool(options.num_threads, max(form.object_bytes for form in formats))
        self._transfers = DiskTransfers(pool, self._tell, self._submit)

        self._committer = DiskCommitter(self._open_index, self._tell)

    def _open_index(self) -> DiskIndex:
        directory = self._options.directory
        return DiskIndex(directory) if self._faults is None else FaultyIndex(directory, self._faults)

    def _open_segment(self, path: Path, size: int) -> SegmentFile:
        return SegmentFile(path, size) if self._faults is None else FaultyFile(path, size, self._faults)

    def serve_namespace(self, namespace: bytes) -> None:
        """Serve objects of this namespace from now on; all others are foreign. The index is read in the background.

        Later calls change nothing: names carry their namespace, so pages of an earlier one just age.
        """
        if self._namespace is not None:
            return
        self._namespace = namespace
        options = self._options
        adoption = Adoption(options.directory, options.quota_bytes, namespace, self._formats, self._open_segment)
        self._committer.submit(Adopt(adoption))

    @property
    def is_adopted(self) -> bool:
        """All that the directory has is known; stores are accepted from now on."""
        return self._is_adopted

    # --- questions -------------------------------------------------------------------------------------------------

    @property
    def _is_serving(self) -> bool:
        return self._health.off_reason is None

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [self._is_serving and self._space.find(key) is not None for key in keys]

    def touch(self, keys: Sequence[PageKey]) -> None:
        self._used.update(self._space.touch(keys, self._clock()))

    def can_accept(self, num_bytes: int) -> bool:
        if not self._is_serving or not self._is_adopted or self._health.is_paused:
            return False
        slot_bytes = aligned(num_bytes)
        try:
            self._room.make_room(slot_bytes)
        except OSError as error:
            self._health.on_error(f"a segment cannot be made: {error}")
        return self._space.num_free(slot_bytes) > 0

    def capacity(self) -> TierCapacity:
        used, off_reason = self._room.total_bytes, self._health.off_reason
        return TierCapacity(self._options.quota_bytes, used, len(self._space), off_reason)

    def statistics(self) -> dict[str, Any]:
        counts = {name: int(count) for name, count in self._counts.items()}
        segments = {"segments": len(self._room.files), "foreign_segments": len(self._room.foreign)}
        return {
            **counts,
            **vars(self.capacity()),
            **segments,
            "objects_bytes": self._space.num_bytes,
            "leaving": self.num_leaving(),
            "queued": self._transfers.num_queued,
            "in_flight": len(self._loads) + len(self._stores),
            "is_paused": self._health.is_paused,
            "is_adopted": self._is_adopted,
            "bytes_loaded": self._loads.num_bytes,
            "bytes_stored": self._stores.num_bytes,
            "load_times": self._loads.times.as_data(),
            "store_times": self._stores.times.as_data(),
            "eviction_ages": self._eviction_ages.as_data(),
        }

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def check_integrity(self) -> list[str]:
        """What is wrong with the slots in memory."""
        return self._space.check_integrity()

    def num_leaving(self) -> int:
        """Counts one for all that is evicted and not adopted yet."""
        is_open = not self._is_adopted and bool(self._evicted_unseen)
        return self._room.num_leaving + sum(each.is_cancelled for each in self._pending.values()) + is_open

    # --- stores ----------------------------------------------------------------------------------------------------

    def submit_store(self, request: StoreRequest) -> None:
        if self._space.find(request.key) is not None:
            self._finish(request.ticket, TransferOutcome.DONE)
            return
        slot_bytes = aligned(request.form.object_bytes)
        may_store = self._is_serving and self._is_adopted and request.key not in self._pending
        place = self._space.take(slot_bytes) if may_store else None
        if place is None:
            self._counts["stores_refused"] += 1
            self._finish(request.ticket, TransferOutcome.REFUSED)
            return
        target = DiskObject(request.key, request.root, *place, request.checksums, self._clock())
        self._pending[request.key] = target
        self._stores.begin(request.ticket)
        self._transfers.submit_write(request, target, self._room.files[target.segment], slot_bytes)

    # --- loads -----------------------------------------------------------------------------------------------------

    def submit_load(self, request: LoadRequest) -> None:
        target = self._space.find(request.key) if self._is_serving else None
        if target is None:
            self._finish(request.ticket, TransferOutcome.MISSING)
            return
        self.touch([request.key])
        target.num_readers += 1
        self._loads.begin(request.ticket)
        slot_bytes = self._space.segments[target.segment].row.slot_bytes
        self._transfers.submit_read(Read(request, target, self._room.files[target.segment], slot_bytes))

    # --- events ----------------------------------------------------------------------------------------------------

    def _tell(self, event: Moved | Event) -> None:
        """From any thread to the manager's."""
        self._events.put(event)
        self._wakeup.set()

    def poll_finished(self) -> list[TransferResult]:
        self._wakeup.clear()
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, Moved):
                self._on_read(event) if event.is_load else self._on_not_written(event)
            elif isinstance(event, Committed):
                self._on_committed(event)
            elif isinstance(event, FoundObjects):
                self._room.adopt_objects(event.objects, self._is_evicted_unseen)
                self._wakeup.set()  # the next ones after whatever else has come
                break
            else:
                self._on_news(event)
        results, self._results = self._results, []
        return results

    def poll_evicted(self) -> list[PageKey]:
        evicted, self._evicted = self._evicted, []
        return evicted

    def _on_news(self, event: IndexReplaced | IndexUnusable | FoundSegments | AdoptionEnd) -> None:
        if isinstance(event, IndexReplaced):
            self._counts["index_resets"] += 1
            directory = self._options.directory
            logger.warning("disk cache: the index in %s cannot be read; it starts empty", directory)
        elif isinstance(event, IndexUnusable):
            self._health.turn_off(f"the index cannot be used: {event.error}")
        elif isinstance(event, FoundSegments):
            self._room.adopt_segments(self._namespace or b"", event)
            self._count_lost("stray_segments", event.num_strays, "segment files that the index does not know")
            self._count_lost("shrunk_segments", event.num_shrunk, "segments beyond the quota")
        else:
            self._room.adopt_free(event)
            self._count_lost("useless_rows", event.num_useless, "rows that do not fit the model")
            self._is_adopted = True
            self._evicted_unseen.clear()
            mine, others = len(self._room.files), len(self._room.foreign)
            logger.info("disk cache: %d pages in %d segments, %d segments of others", len(self._space), mine, others)

    def _count_lost(self, name: str, number: int, what: str) -> None:
        if number:
            self._counts[name] += number
            logger.warning("disk cache: %d %s are deleted", number, what)

    def _is_evicted_unseen(self, each: DiskObject) -> bool:
        return any(is_wanted(each) for is_wanted in self._evicted_unseen)

    def _on_read(self, event: Moved) -> None:
        target = event.target
        target.num_readers -= 1
        self._counts[f"loads_{event.outcome.value}"] += 1
        if event.outcome is TransferOutcome.FAILED:
            self._health.on_error(f"a read failed: {event.error}")
        elif event.outcome is TransferOutcome.CORRUPT:
            self._health.on_damage(target.segment)
        is_bad = event.outcome in (TransferOutcome.FAILED, TransferOutcome.CORRUPT)
        if is_bad and self._space.find(target.key) is target:
            self._room.remove([target])
            self._evicted.append(target.key)
        elif target.is_cancelled and not target.num_readers:
            self._room.delete_rows([target])
        self._loads.end(event.ticket, self._bytes_of(target) if event.outcome is TransferOutcome.DONE else None)
        self._finish(event.ticket, event.outcome, target.checksums)

    def _on_not_written(self, event: Moved) -> None:
        target = event.target
        del self._pending[target.key]
        self._space.give_back([(target.segment, target.slot)])
        self._counts[f"stores_{event.outcome.value}"] += 1
        self._stores.end(event.ticket, None)
        if event.outcome is TransferOutcome.FAILED:
            self._health.on_error(f"a write failed: {event.error}")
        self._finish(event.ticket, event.outcome)

    def _on_committed(self, event: Committed) -> None:
        command = event.command
        if isinstance(command, Adopt) and event.error is not None:
            self._health.turn_off(f"the directory cannot be read: {event.error}")
        elif event.error is not None and self._is_serving:
            self._health.on_error(f"the index could not be changed: {event.error}")
        if isinstance(command, CommitStore):
            self._on_stored(command, event.error is None)
        elif isinstance(command, CommitRemoval):
            self._room.rows_are_gone(command.slots, event.error is None)
        elif isinstance(command, CommitSegmentRemoval):
            self._room.segment_is_gone(command.file)

    def _on_stored(self, command: CommitStore, is_done: bool) -> None:
        target = command.target
        del self._pending[target.key]
        self._counts["stores_done" if is_done else "stores_failed"] += 1
        self._stores.end(command.ticket, self._bytes_of(target) if is_done else None)
        if not is_done:
            self._space.give_back([(target.segment, target.slot)])
        elif target.is_cancelled:
            self._room.delete_rows([target])
        else:
            self._space.publish(target)
            self._finish(command.ticket, TransferOutcome.DONE)
            return
        self._finish(command.ticket, TransferOutcome.REFUSED if is_done else TransferOutcome.FAILED)

    def _bytes_of(self, target: DiskObject) -> int:
        return self._formats[target.key.group].object_bytes

    def _finish(self, ticket: TierTicket, outcome: TransferOutcome, checksums: Checksums | None = None) -> None:
        if checksums is None or outcome is not TransferOutcome.DONE:
            self._results.append(TransferResult(ticket, outcome))
        else:
            self._results.append(TransferResult(ticket, outcome, checksums))
        self._wakeup.set()

    def _submit(self, command: Command) -> None:
        self._committer.submit(command)

    def _on_evicted(self, target: DiskObject) -> None:
        """The room needs this object's place."""
        self._evicted.append(target.key)
        self._counts["evicted"] += 1
        self._eviction_ages.observe(max(0.0, self._clock() - target.last_use))

    # --- eviction --------------------------------------------------------------------------------------------------

    def evict(self, keys: Sequence[PageKey]) -> None:
        wanted = set(keys)
        self._evict(lambda each: each.key in wanted)

    def evict_root(self, root: bytes | None) -> None:
        self._evict(lambda each: root is None or each.root == root)

    def _evict(self, is_wanted: Callable[[DiskObject], bool]) -> None:
        self._room.remove([each for each in self._space if is_wanted(each)])
        for each in self._pending.values():
            each.is_cancelled |= is_wanted(each)
        if not self._is_adopted:
            self._evicted_unseen.append(is_wanted)

    # --- trouble and housekeeping ----------------------------------------------------------------------------------

    def tick(self) -> None:
        hung = self._transfers.num_hung(self._options.hang_s)
        if hung >= MAX_HUNG:
            self._health.turn_off(f"{hung} reads or writes hang")
        if self._is_adopted and self._committer.is_hung(self._options.hang_s):
            self._health.turn_off("a sync or the index hangs")
        if not self._is_serving:
            self._transfers.refuse_queued()
        if self._clock() - self._flushed_at >= LAST_USE_PERIOD_S:
            self._flush_last_use()

    def _flush_last_use(self) -> None:
        self._flushed_at = self._clock()
        uses = [(each.last_use, each.segment, each.slot) for each in self._used if not each.is_cancelled]
        self._used.clear()
        if uses:
            self._submit(CommitLastUse(uses))

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._flush_last_use()
        deadline = time.monotonic() + timeout_s
        is_idle = self._transfers.close(timeout_s)
        is_idle &= self._committer.close(max(0.0, deadline - time.monotonic()))
        if is_idle:  # otherwise a thread still uses the files; the end of the process closes them
            self._room.close()
        self._lock.release()
