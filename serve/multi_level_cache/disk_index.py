"""The disk tier's index in SQLite: which object lies in which slot of which segment. Payload stays in the segments.

One connection, used by one thread at a time. Every call that changes something is one transaction; the caller orders
them against writes of payload (a row only after its bytes are synced, a slot again only after its row is gone).
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey

INDEX_FILE = "index.sqlite"
FORMAT_VERSION = 1

_SCHEMA = """
create table segments (id integer primary key, namespace blob not null, slot_bytes integer not null,
    num_slots integer not null);
create table objects (segment integer not null, slot integer not null, name blob not null, grp text not null,
    root blob not null, checksums blob not null, last_use real not null, primary key (segment, slot)) without rowid;
"""
# Apart from the rest: an index that was made without it gets it at its next start.
_FORMATS = """
create table if not exists formats (namespace blob not null, grp text not null, group_index integer not null,
    page_tokens integer not null, unit_bytes text not null, primary key (namespace, grp)) without rowid
"""


_COLUMNS = (
    "id, namespace, slot_bytes, num_slots from segments",
    "segment, slot, name, grp, root, checksums, last_use from objects",
    "namespace, grp, group_index, page_tokens, unit_bytes from formats",
)
# SQLite keeps a value of any type in any column. A bad row of an object is its own affair; of a segment, of all in it.
_BAD_SEGMENTS = """
select id from segments where typeof(namespace) != 'blob'
    or typeof(slot_bytes) != 'integer' or typeof(num_slots) != 'integer' or slot_bytes < 1 or num_slots < 1
"""
# Everything else that SQLite may say (no room, no permission, a failing disk) is no reason to throw an index away.
_DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class IndexDamagedError(sqlite3.DatabaseError):
    """The index can be read, and what stands in it cannot be used."""


def is_damage(error: sqlite3.Error) -> bool:
    """Is the index itself to blame, so that only an empty one helps?"""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, IndexDamagedError) or (code is not None and code & 0xFF in _DAMAGE)


@dataclass(frozen=True)
class SegmentRow:
    """One segment file."""

    number: int
    namespace: bytes
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * self.num_slots


@dataclass(frozen=True)
class ObjectRow:
    """One object. checksums: uint64 of its units, as bytes; last_use: seconds since the epoch."""

    segment: int
    slot: int
    key: PageKey
    root: bytes
    checksums: bytes
    last_use: float


class DiskIndex:
    """The index file. A damaged one, or one of another format, is replaced by an empty one unless told not to."""

    def __init__(self, directory: Path, may_replace: bool = True) -> None:
        """Raises sqlite3.Error, OSError when the index cannot be read, and is not or must not be replaced."""
        self._path = directory / INDEX_FILE
        self.was_reset = False
        try:
            self._connection = self._open()
        except sqlite3.DatabaseError as error:
            if not may_replace or not is_damage(error):
                raise
            self._replace()

    def _replace(self) -> None:
        self.was_reset = True
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        # Made here for its mode: SQLite gives its other files that of the first.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = normal")
            (version,) = connection.execute("pragma user_version").fetchone()
            if version == 0:
                connection.executescript(f"begin; {_SCHEMA} pragma user_version = {FORMAT_VERSION}; commit;")
            elif version != FORMAT_VERSION:
                raise IndexDamagedError(f"format {version}")
            connection.execute(_FORMATS)
            connection.execute("pragma temp_store = memory")
            for columns in _COLUMNS:
                connection.execute(f"select {columns} limit 0")
            is_whole = connection.execute("pragma quick_check").fetchone() == ("ok",)
            if not is_whole or connection.execute(_BAD_SEGMENTS).fetchone() is not None:
                raise IndexDamagedError("damaged")
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    def segments(self) -> list[SegmentRow]:
        """All segments."""
        rows = self._connection.execute("select id, namespace, slot_bytes, num_slots from segments order by id")
        return [SegmentRow(*row) for row in rows]

    def objects(self, segment: int) -> list[ObjectRow]:
        """All objects of a segment."""
        rows = self._connection.execute(
            "select slot, name, grp, root, checksums, last_use from objects where segment = ?", (segment,)
        )
        return [ObjectRow(segment, row[0], PageKey(row[1], row[2]), *row[3:]) for row in rows]

    def newest_objects(self, namespace: bytes) -> Iterator[ObjectRow]:
        """All objects of a namespace's segments, most recently used first."""
        rows = self._connection.execute(
            "select segment, slot, name, grp, root, checksums, last_use from objects"
            " where segment in (select id from segments where namespace = ?) order by last_use desc",
            (namespace,),
        )
        for segment, slot, name, group, *rest in rows:
            yield ObjectRow(segment, slot, PageKey(name, group), *rest)

    def last_use(self, segment: int) -> float:
        """The latest use of any object of a segment; 0 when it has none."""
        (latest,) = self._connection.execute(
            "select max(last_use) from objects where segment = ? and typeof(last_use) = 'real'", (segment,)
        ).fetchone()
        return float(latest or 0.0)

    def delete_orphans(self) -> None:
        """Objects of segments that are not there."""
        self._connection.execute("delete from objects where segment not in (select id from segments)")

    def num_orphans(self) -> int:
        """How many objects are of segments that are not there."""
        rows = "select count(*) from objects where segment not in (select id from segments)"
        (count,) = self._connection.execute(rows).fetchone()
        return int(count)

    def formats(self, namespace: bytes) -> dict[str, ObjectFormat]:
        """What objects of a namespace look like, by group; empty when no server has told since the table exists."""
        rows = self._connection.execute(
            "select grp, group_index, page_tokens, unit_bytes from formats where namespace = ?", (namespace,)
        )
        return {row[0]: ObjectFormat(row[0], row[1], row[2], tuple(map(int, row[3].split()))) for row in rows}

    def set_formats(self, namespace: bytes, formats: Iterable[ObjectFormat]) -> None:
        """Keep what a checker without the model needs; forget namespaces of which no segment is left."""
        rows = [(namespace, form.group, form.group_index, form.page_tokens, _sizes(form)) for form in formats]
        with self._transaction():
            self._connection.execute("delete from formats where namespace not in (select namespace from segments)")
            self._connection.executemany("insert or replace into formats values (?, ?, ?, ?, ?)", rows)

    def add_segment(self, segment: SegmentRow) -> None:
        """A segment file is there."""
        row = (segment.number, segment.namespace, segment.slot_bytes, segment.num_slots)
        self._connection.execute("insert into segments values (?, ?, ?, ?)", row)

    def remove_segment(self, number: int) -> None:
        """A segment is to go, with all its objects; its file is deleted after this."""
        with self._transaction():
            self._connection.execute("delete from objects where segment = ?", (number,))
            self._connection.execute("delete from segments where id = ?", (number,))

    def change(self, added: Sequence[ObjectRow], removed: Iterable[tuple[int, int]]) -> None:
        """Remove rows by (segment, slot), then add rows, all in one transaction."""
        with self._transaction():
            self._connection.executemany("delete from objects where segment = ? and slot = ?", removed)
            self._connection.executemany(
                "insert or replace into objects values (?, ?, ?, ?, ?, ?, ?)",
                [(row.segment, row.slot, *row.key, row.root, row.checksums, row.last_use) for row in added],
            )

    def set_last_use(self, uses: Iterable[tuple[float, int, int]]) -> None:
        """(time, segment, slot) of objects used since the last call."""
        with self._transaction():
            self._connection.executemany("update objects set last_use = ? where segment = ? and slot = ?", uses)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._connection)


def _sizes(form: ObjectFormat) -> str:
    return " ".join(map(str, form.unit_bytes))


class _Transaction:
    """All or nothing."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("begin immediate")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._connection.execute("commit" if kind is None else "rollback")
