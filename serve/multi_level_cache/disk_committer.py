"""The one thread that changes the index: syncs payload, then commits its rows; deletes rows, then frees their slots.

Events go to `tell`, in the order of the commits. An error fails what it hit and is told; the thread goes on.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.multi_level_cache.disk_index import DiskIndex, SegmentRow
from serve.multi_level_cache.disk_io import SegmentFile
from serve.multi_level_cache.disk_space import DiskObject
from serve.multi_level_cache.page_state import TierTicket

MAX_BATCH = 256


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


Command = CommitStore | CommitRemoval | CommitSegment | CommitSegmentRemoval | CommitLastUse


@dataclass(frozen=True)
class Committed:
    """A command has ended. error: one line, when it failed."""

    command: Command
    error: str | None = None


class DiskCommitter:
    """Owns the index from its start on."""

    def __init__(self, index: DiskIndex, tell: Callable[[Committed], None]) -> None:
        self._index = index
        self._tell = tell
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="disk-committer", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Any thread may call; commands are carried out in order."""
        self._commands.put(command)

    def close(self, timeout_s: float) -> bool:
        """Carry out what was submitted, then close the index; False when that takes longer."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            batch, is_last = self._take()
            while batch:
                stores = _leading_stores(batch)
                if stores:
                    self._commit_stores(stores)
                    batch = batch[len(stores) :]
                else:
                    self._carry_out(batch.pop(0))
            if is_last:
                self._index.close()
                return

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

    def _commit_stores(self, stores: list[CommitStore]) -> None:
        error = None
        try:
            for file in {store.file for store in stores}:
                file.sync()
            self._index.change([store.target.row() for store in stores], [])
        except (OSError, sqlite3.Error) as caught:
            error = str(caught)
        for store in stores:
            self._tell(Committed(store, error))

    def _carry_out(self, command: Command) -> None:
        error = None
        try:
            if isinstance(command, CommitRemoval):
                self._index.change([], command.slots)
            elif isinstance(command, CommitSegment):
                self._index.add_segment(command.row)
            elif isinstance(command, CommitSegmentRemoval):
                self._index.remove_segment(command.number)
                command.file.delete()
            elif isinstance(command, CommitLastUse):
                self._index.set_last_use(command.uses)
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
