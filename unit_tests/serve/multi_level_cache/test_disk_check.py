"""The offline check of a disk cache directory: it finds what a server could not use, and deletes it when told."""

import os
import stat
from pathlib import Path

import pytest

from serve.multi_level_cache.disk_check import CheckReport, check_directory
from serve.multi_level_cache.disk_directory import DirectoryLock, DiskDirectoryError, load_or_create_key
from serve.multi_level_cache.disk_index import INDEX_FILE, DiskIndex
from unit_tests.serve.multi_level_cache.builders import STATE
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three objects of one group, one of another, in two segments."""
    load_or_create_key(tmp_path)
    disk = Disk(tmp_path)
    disk.store("a", "b", "c")
    disk.store("s", form=STATE)
    disk.tier.close(10)
    return tmp_path


def texts(report: CheckReport) -> str:
    return "; ".join(problem.text for problem in report.problems)


def check_then_fix(directory: Path, expected: str) -> None:
    """The problem is told, changes nothing, is put right on demand, and is gone."""
    found = check_directory(directory)
    assert expected in texts(found)
    assert found.num_unfixed == len(found.problems)
    assert texts(check_directory(directory)) == texts(found)
    fixed = check_directory(directory, fix=True)
    assert expected.split(":")[0][:10] in texts(fixed)
    assert fixed.num_unfixed == 0
    assert check_directory(directory).problems == []


def test_a_sound_directory_has_no_problems_and_serves_on(directory: Path) -> None:
    report = check_directory(directory, fix=True)
    assert (report.num_objects, report.num_segments, report.num_unknown, report.problems) == (4, 2, 0, [])
    assert report.num_bytes == 3 * 4096 + STATE.object_bytes
    disk = Disk(directory)
    assert disk.has("a", "b", "c") == [True] * 3
    disk.tier.close(10)


def test_damaged_bytes_cost_their_object_only(directory: Path) -> None:
    with (directory / "segment-00000001").open("r+b") as file:
        where = next(row.slot for row in _rows(directory, 1))
        file.seek(where * 4096 + 7)
        file.write(b"\xff\x01\x02")
    check_then_fix(directory, "the bytes do not match their checksum")
    assert check_directory(directory).num_objects == 3


def test_a_missing_segment_and_a_stray_one(directory: Path) -> None:
    (directory / "segment-00000002").rename(directory / "segment-00000007")
    check_then_fix(directory, "segment-00000002 is missing")
    assert not (directory / "segment-00000007").exists()


def test_a_short_segment_loses_what_lay_behind_its_end(directory: Path) -> None:
    os.truncate(directory / "segment-00000001", 0)
    check_then_fix(directory, "segment-00000001 has 0 bytes")
    assert check_directory(directory).num_objects == 1


def test_a_key_that_others_can_read(directory: Path) -> None:
    (directory / "key").chmod(0o644)
    check_then_fix(directory, "key can be read by others")
    assert stat.S_IMODE((directory / "key").stat().st_mode) == 0o600


def test_an_unreadable_index_is_replaced_only_when_told(directory: Path) -> None:
    (directory / INDEX_FILE).write_bytes(b"no database at all" * 1000)
    for suffix in ("-wal", "-shm"):
        (directory / f"{INDEX_FILE}{suffix}").unlink(missing_ok=True)
    before = (directory / INDEX_FILE).read_bytes()
    assert "the index cannot be used" in texts(check_directory(directory))
    assert (directory / INDEX_FILE).read_bytes() == before
    assert check_directory(directory, fix=True).num_unfixed == 0
    assert check_directory(directory).problems == []


def test_objects_of_an_unknown_format_are_counted_not_deleted(directory: Path) -> None:
    index = DiskIndex(directory)
    index._connection.execute("delete from formats")
    index.close()
    report = check_directory(directory, fix=True)
    assert (report.num_unknown, report.num_bytes, report.problems) == (4, 0, [])


def test_a_directory_in_use_is_left_alone(directory: Path) -> None:
    lock = DirectoryLock(directory)
    with pytest.raises(DiskDirectoryError, match="used by another server"):
        check_directory(directory, fix=True)
    lock.release()


def test_what_is_no_disk_cache_is_told_and_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(DiskDirectoryError, match="is no disk cache"):
        check_directory(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def _rows(directory: Path, segment: int):  # type: ignore[no-untyped-def]
    index = DiskIndex(directory)
    rows = index.objects(segment)
    index.close()
    return rows
