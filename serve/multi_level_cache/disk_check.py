"""Checks a disk cache directory that no server uses: rows against bytes, and files against rows.

It needs no model: servers leave the formats of their objects in the index. Without `fix` nothing is changed but the
lock file; with it, what a server could not use is deleted. Nothing is ever repaired: a page can be recomputed.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from serve.multi_level_cache.disk_adoption import SEGMENT_PREFIX, segment_path
from serve.multi_level_cache.disk_directory import KEY_BYTES, KEY_FILE, DirectoryLock, DiskDirectoryError
from serve.multi_level_cache.disk_index import INDEX_FILE, DiskIndex, ObjectRow, SegmentRow
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey

KEY_MODE = 0o600


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. is_fixed: it has been put right by deleting what is of no use."""

    text: str
    is_fixed: bool


@dataclass
class CheckReport:
    """What a check found. num_unknown: objects of a format that no server has left, whose bytes were not checked."""

    num_segments: int = 0
    num_objects: int = 0
    num_bytes: int = 0
    num_unknown: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def num_unfixed(self) -> int:
        return sum(not problem.is_fixed for problem in self.problems)


def check_directory(directory: Path, fix: bool = False) -> CheckReport:
    """Check all of a directory. Raises DiskDirectoryError when it is none, is in use, or cannot be read."""
    if not (directory / INDEX_FILE).is_file():
        raise DiskDirectoryError(f"{directory} is no disk cache: it has no {INDEX_FILE}")
    lock = DirectoryLock(directory)
    try:
        return _Checker(directory, fix).run()
    except (OSError, sqlite3.Error) as error:
        raise DiskDirectoryError(f"disk cache {directory} cannot be checked: {error}") from error
    finally:
        lock.release()


class _Checker:
    def __init__(self, directory: Path, fix: bool) -> None:
        self._directory = directory
        self._fix = fix
        self._report = CheckReport()
        self._seen: dict[tuple[bytes, PageKey], str] = {}

    def run(self) -> CheckReport:
        self._check_key()
        try:
            index = DiskIndex(self._directory, may_replace=self._fix)
        except sqlite3.DatabaseError as error:
            self._add(f"the index cannot be used ({error}): a server would start with an empty one", is_fixed=False)
            return self._report
        try:
            if index.was_reset:
                self._add("the index could not be used: it is empty now", is_fixed=True)
            self._check_rows(index)
            self._check_files({row.number for row in index.segments()})
        finally:
            index.close()
        return self._report

    def _add(self, text: str, is_fixed: bool | None = None) -> None:
        self._report.problems.append(Problem(text, self._fix if is_fixed is None else is_fixed))

    def _check_key(self) -> None:
        path = self._directory / KEY_FILE
        if not path.exists():
            self._add(f"{KEY_FILE} is missing: no page of before can be found", is_fixed=False)
            return
        status = path.stat()
        if status.st_size != KEY_BYTES:
            self._add(
                f"{KEY_FILE} has {status.st_size} bytes, not {KEY_BYTES}: remove it to start anew", is_fixed=False
            )
        if status.st_mode & 0o077:
            self._add(f"{KEY_FILE} can be read by others: whoever has it can name pages")
            if self._fix:
                path.chmod(KEY_MODE)

    # --- rows ------------------------------------------------------------------------------------------------------

    def _check_rows(self, index: DiskIndex) -> None:
        orphans = index.num_orphans()
        if orphans:
            self._add(f"{orphans} objects are of segments that the index does not have")
            if self._fix:
                index.delete_orphans()
        for row in index.segments():
            self._report.num_segments += 1
            try:
                fd = os.open(self._path(row.number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._add(f"{self._path(row.number).name} is missing")
                if self._fix:
                    index.remove_segment(row.number)
                continue
            with _closing(fd):
                self._check_segment(index, row, fd)

    def _check_segment(self, index: DiskIndex, row: SegmentRow, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size != row.num_bytes:
            self._add(f"{self._path(row.number).name} has {size} bytes, not {row.num_bytes}")
            if self._fix:
                os.truncate(self._path(row.number), row.num_bytes)
        formats, bad = index.formats(row.namespace), []
        for each in index.objects(row.number):
            problem = self._check_object(row, each, formats, fd)
            if problem is not None:
                self._add(f"{self._path(row.number).name} slot {each.slot}: {problem}")
                bad.append((row.number, each.slot))
        if self._fix and bad:
            index.change([], bad)

    def _check_object(self, row: SegmentRow, each: ObjectRow, formats: dict[str, ObjectFormat], fd: int) -> str | None:
        """What is wrong with an object, or None."""
        self._report.num_objects += 1
        if not 0 <= each.slot < row.num_slots:
            return f"the segment has {row.num_slots} slots only"
        place = f"{self._path(row.number).name} slot {each.slot}"
        first = self._seen.setdefault((row.namespace, each.key), place)
        if first != place:
            return f"the same object lies in {first}"
        form = formats.get(each.key.group)
        if form is None:
            self._report.num_unknown += 1
            return None
        if form.object_bytes > row.slot_bytes or len(each.checksums) != 8 * len(form.unit_bytes):
            return f"the row does not fit the format of group {each.key.group}"
        return self._check_bytes(row, each, form, fd)

    def _check_bytes(self, row: SegmentRow, each: ObjectRow, form: ObjectFormat, fd: int) -> str | None:
        start = each.slot * row.slot_bytes
        try:
            data = os.pread(fd, form.object_bytes, start)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        os.posix_fadvise(fd, start, row.slot_bytes, os.POSIX_FADV_DONTNEED)
        self._report.num_bytes += len(data)
        if len(data) < form.object_bytes:
            return "lies beyond the end of the file"
        seeds = unit_seeds([each.key.name], form.group_index, form.unit_bytes)[0]
        sums = object_checksums(data, form.unit_bytes, seeds)
        if not np.array_equal(sums, np.frombuffer(each.checksums, dtype=np.uint64)):
            return "the bytes do not match their checksum"
        return None

    # --- files -----------------------------------------------------------------------------------------------------

    def _check_files(self, known: set[int]) -> None:
        for path in sorted(self._directory.glob(f"{SEGMENT_PREFIX}*")):
            number = path.name.removeprefix(SEGMENT_PREFIX)
            if number.isdigit() and int(number) in known:
                continue
            is_ours = number.isdigit()
            self._add(f"{path.name} is in no row of the index", is_fixed=self._fix and is_ours)
            if self._fix and is_ours:
                path.unlink()

    def _path(self, number: int) -> Path:
        return segment_path(self._directory, number)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
