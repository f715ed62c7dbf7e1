"""The one thread that uses the index: takes over what is there, syncs payload and commits its rows, deletes rows.

Events go to `tell`, in the order of the commands. An error of the disk fails what it hit and is told; the thread goes
on. Any other error makes the index unusable: every command that is left fails, and still has its answer.
"""

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.multi_level_cache.disk_adoption import Adoption, Found
from serve.multi_level_cache.disk_index import DiskIndex, SegmentRow
from serve.multi_level_cache.disk_io import SegmentFile
from serve.multi_level_cache.disk_space import DiskObject
from serve.multi_level_cache.page_state import TierTicket

MAX_BATCH = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommitStore:
    """Bytes of an object were written: make them safe, then findable."""

    ticket: TierTicket
    target: DiskObject
    file: SegmentFile


@dataclass(frozen=True)
class CommitRemoval:
    """Delete the rows of these slots."""

    slots: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class CommitSegment:
    """A new segment; comes before the first object in it."""

    row: SegmentRow


@dataclass(frozen=True)
class CommitSegmentRemoval:
    """Delete a segment's rows, then its file."""

    number: int
    file: SegmentFile


@dataclass(frozen=True)
class CommitLastUse:
    """(time, segment, slot) of objects."""

    uses: Sequence[tuple[float, int, int]]


@dataclass(frozen=True)
class Adopt:
    """Tell what the directory has; comes first."""

    adoption: Adoption


Command = CommitStore | CommitRemoval | CommitSegment | CommitSegmentRemoval | CommitLastUse | Adopt


@dataclass(frozen=True)
class Committed:
    """A command has ended. error: one line, when it failed."""

    command: Command
    error: str | None = None


@dataclass(frozen=True)
class IndexReplaced:
    """The index was damaged: it is empty now."""


@dataclass(frozen=True)
class IndexUnusable:
    """There is no index, and no command will succeed. error: one line."""

    error: str


Event = Committed | IndexReplaced | IndexUnusable | Found


class DiskCommitter:
    """Owns the index, which `open_index` opens on the thread: checking a large one takes a while."""

    def __init__(self, open_index: Callable[[], DiskIndex], tell: Callable[[Event], None]) -> None:
        self._open_index = open_index
        self._tell = tell
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="disk-committer", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Any thread may call; commands are carried out in order."""
        self._commands.put(command)

    def is_hung(self, timeout_s: float) -> bool:
        """What is being carried out has taken longer than that."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > timeout_s

    def close(self, timeout_s: float) -> bool:
        """Carry out what was submitted, then close the index; False when that takes longer."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        index = self._open()
        is_last = False
        while not is_last:
            batch, is_last = self._take()
            if index is not None and not self._carry_out_all(index, batch):
                with contextlib.suppress(sqlite3.Error):
                    index.close()
                index = None
            for command in batch:
                self._tell(Committed(command, "there is no index"))
        if index is not None:
            index.close()

    def _carry_out_all(self, index: DiskIndex, batch: list[Command]) -> bool:
        """Takes out of the batch what is answered. False: the index is of no use any more."""
        try:
            while batch:
                self._busy_since = time.monotonic()
                stores = _leading_stores(batch)
                if stores:
                    self._commit_stores(index, stores)
                else:
                    self._carry_out(index, batch[0])
                del batch[: len(stores) or 1]
        except Exception as error:  # whoever waits for an answer must have one, and the tier must know
            self._give_up(error)
            return False
        finally:
            self._busy_since = None
        return True

    def _give_up(self, error: Exception) -> None:
        logger.error("disk cache: the thread of the index has failed", exc_info=error)
        self._tell(IndexUnusable(f"{type(error).__name__}: {error}"))

    def _open(self) -> DiskIndex | None:
        try:
            index = self._open_index()
        except (OSError, sqlite3.Error) as error:
            self._tell(IndexUnusable(str(error)))
            return None
        except Exception as error:
            self._give_up(error)
            return None
        if index.was_reset:
            self._tell(IndexReplaced())
        return index

    def _take(self) -> tuple[list[Command], bool]:
        """What is there, at least one command; True when it was the end."""
        batch: list[Command] = []
        command = self._commands.get()
        while command is not None:
            batch.append(command)
            if len(batch) == MAX_BATCH:
                return batch, False
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _commit_stores(self, index: DiskIndex, stores: list[CommitStore]) -> None:
        error = None
        try:
            for file in {store.file for store in stores}:
                file.sync()
            index.change([store.target.row() for store in stores], [])
        except (OSError, sqlite3.Error) as caught:
            error = str(caught)
        for store in stores:
            self._tell(Committed(store, error))

    def _carry_out(self, index: DiskIndex, command: Command) -> None:
        error = None
        try:
            if isinstance(command, CommitRemoval):
                index.change([], command.slots)
            elif isinstance(command, CommitSegment):
                index.add_segment(command.row)
            elif isinstance(command, CommitSegmentRemoval):
                index.remove_segment(command.number)
                command.file.delete()
            elif isinstance(command, CommitLastUse):
                index.set_last_use(command.uses)
            elif isinstance(command, Adopt):
                command.adoption.run(index, self._tell)
        except (OSError, sqlite3.Error) as caught:
            error = str(caught)
        self._tell(Committed(command, error))


def _leading_stores(batch: list[Command]) -> list[CommitStore]:
    stores: list[CommitStore] = []
    for command in batch:
        if not isinstance(command, CommitStore):
            break
        stores.append(command)
    return stores
