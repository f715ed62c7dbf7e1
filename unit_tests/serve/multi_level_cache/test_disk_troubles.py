"""What can be wrong with a directory: no wrong hit, no crash, one clear line and a counter each."""

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve.multi_level_cache.disk_directory import DiskDirectoryError
from serve.multi_level_cache.disk_index import DiskIndex
from serve.multi_level_cache.disk_room import DiskOptions
from serve.multi_level_cache.disk_tier import DiskTier
from serve.multi_level_cache.fault_injector import FaultInjector, parse_faults
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.secondary_tier import TransferOutcome
from unit_tests.serve.multi_level_cache.builders import FORMATS, FULL, STATE
from unit_tests.serve.multi_level_cache.test_disk_tier import ROOT, SPACE, Disk, content, segments

NAMES = range(12)
NOBODY = 65534


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Twelve objects and one of another group, as a server that has ended left them."""
    disk = Disk(tmp_path / "cache")
    disk.store(*NAMES)
    disk.store("s", form=STATE)
    disk.tier.close(10)
    return tmp_path / "cache"


def execute(directory: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(directory / "index.sqlite")) as index:
        for statement in statements:
            index.execute(statement)
        index.commit()


def found(disk: Disk) -> list[bool]:
    """What is there; whatever is, is right."""
    here = disk.has(*NAMES)
    assert all(disk.is_good(name) for name in NAMES if here[name])
    assert disk.tier.check_integrity() == []
    return here


# --- the index -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "pragma user_version = 7",
        "alter table objects drop column root",
        "drop table segments",
        "alter table objects rename column last_use to used",
        "update segments set slot_bytes = 'x' where id = 1",
    ],
)
def test_an_index_of_another_version_is_replaced(directory: Path, statement: str, caplog: pytest.LogCaptureFixture):
    execute(directory, statement)
    disk = Disk(directory)
    assert found(disk) == [False] * len(NAMES)
    assert caplog.messages[0] == f"disk cache: the index in {directory} cannot be read; it starts empty"
    assert caplog.messages[1:] == ["disk cache: 2 segment files that the index does not know are deleted"]
    counts = disk.tier.statistics()
    assert (counts["index_resets"], counts["stray_segments"]) == (1, 2)
    assert disk.store("new") == [TransferOutcome.DONE]
    disk.tier.close(10)


@pytest.mark.parametrize("seed", range(24))
def test_a_cut_or_scratched_index_gives_no_wrong_hit(directory: Path, seed: int, caplog: pytest.LogCaptureFixture):
    """Half of them are cut off somewhere, half have a few wrong bytes anywhere."""
    dice, path = random.Random(seed), directory / "index.sqlite"
    data = bytearray(path.read_bytes())
    if seed % 2:
        del data[dice.randrange(1, len(data)) :]
    for _ in range(0 if seed % 2 else 1 + seed // 2):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    disk = Disk(directory)
    for name in NAMES:
        result, loaded = disk.load(name)
        assert result.outcome is not TransferOutcome.DONE or (loaded == content(name, FULL)).all()
    if disk.tier.capacity().off_reason is None:
        disk.store("new")
        assert disk.tier.check_integrity() == []
    assert len(caplog.messages) <= 3
    disk.tier.close(10)


def test_an_index_that_cannot_be_read_for_another_reason_is_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(index: DiskIndex) -> sqlite3.Connection:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "_open", refuse)
        disk = Disk(directory)
        assert disk.tier.capacity().off_reason == "the index cannot be used: disk I/O error"
        assert caplog.messages == ["disk cache: off, because the index cannot be used: disk I/O error"]
        assert disk.tier.statistics()["errors"] == 1
        assert disk.has(0) == [False]
        assert not disk.tier.can_accept(4096)
        disk.tier.evict_root(None)
        assert disk.tier.num_leaving(), "a flush is not done while the next start could find the pages"
        disk.tier.close(10)
    assert found(Disk(directory)) == [True] * len(NAMES)


def test_rows_that_do_not_fit_the_model_go(directory: Path, caplog: pytest.LogCaptureFixture):
    execute(
        directory,
        "update objects set checksums = x'00' where segment = 1 and slot = 0",
        "update objects set slot = 99 where segment = 1 and slot = 1",
        "update objects set grp = 'gone' where segment = 1 and slot = 2",
    )
    disk = Disk(directory)
    assert sum(found(disk)) == len(NAMES) - 3
    assert caplog.messages == ["disk cache: 3 rows that do not fit the model are deleted"]
    assert disk.tier.statistics()["useless_rows"] == 3
    again = disk.reopen()
    assert sum(found(again)) == len(NAMES) - 3
    assert again.tier.statistics().get("useless_rows", 0) == 0
    again.tier.close(10)


def test_rows_with_values_of_another_type_go(directory: Path):
    execute(
        directory,
        "update objects set checksums = 7 where segment = 1 and slot = 0",
        "update objects set last_use = 'x' where segment = 1 and slot = 1",
        "update objects set name = 5 where segment = 1 and slot = 2",
        "update objects set root = 'r' where segment = 1 and slot = 3",
        "update objects set grp = x'00' where segment = 1 and slot = 4",
        "update objects set slot = 'x' where segment = 1 and slot = 5",
    )
    disk = Disk(directory)
    assert disk.tier.capacity().off_reason is None
    assert sum(found(disk)) == len(NAMES) - 6
    assert disk.tier.statistics()["useless_rows"] == 6
    disk.tier.close(10)


def test_the_newer_of_two_rows_of_one_object_is_served(directory: Path):
    """The older row's deletion failed, then the object was stored again."""
    execute(
        directory,
        "insert into objects select segment, slot + 20, name, grp, root, checksums, 1.0 from objects where slot = 0",
    )
    disk = Disk(directory)
    assert found(disk) == [True] * len(NAMES)
    assert disk.tier.statistics()["useless_rows"] == 2
    disk.tier.close(10)


# --- quota, other models, other servers ----------------------------------------------------------------------------


def test_a_smaller_quota_is_told_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    disk = Disk(tmp_path, quota=64 * 4096)
    disk.store(*range(60))
    small = disk.reopen(quota=16 * 4096)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 16 * 4096
    assert caplog.messages == ["disk cache: 3 segments beyond the quota are deleted"]
    assert small.tier.statistics()["shrunk_segments"] == 3
    small.tier.close(10)


OTHERS = {
    "model or data type": (b"o" * 32, FORMATS),
    "page size": (b"p" * 32, (ObjectFormat("full", 0, 32, (1024, 1024)), ObjectFormat("state", 1, 32, (2500, 2500)))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_pages_of_another_kind_are_not_found_and_kept(directory: Path, kind: str):
    namespace, formats = OTHERS[kind]
    other = DiskTier(DiskOptions(directory, 1 << 20, segment_bytes=1 << 17), formats)
    other.serve_namespace(namespace)
    while not other.is_adopted:
        other.poll_finished()
    assert other.capacity().num_objects == 0
    assert other.statistics()["foreign_segments"] == 2
    other.close(10)
    back = Disk(directory)
    assert found(back) == [True] * len(NAMES)
    assert back.is_good("s", STATE)
    back.tier.close(10)


# --- the file system says no ---------------------------------------------------------------------------------------

AS_NOBODY = """
import logging, os, sys
from pathlib import Path
from serve.multi_level_cache.disk_directory import DiskDirectoryError
from unit_tests.serve.multi_level_cache import test_disk_troubles
os.setuid(65534)
logging.basicConfig(format="%(message)s")
try:
    getattr(test_disk_troubles, sys.argv[1])(Path(sys.argv[2]))
except DiskDirectoryError as error:
    print("refused:", error)
"""


def run_as_nobody(name: str, directory: Path) -> str:
    """Lines that a function of this module prints and logs as a user without rights; the others run as root in CI."""
    for path in (directory, *directory.parents):
        if path == Path("/tmp"):
            break
        path.chmod(path.stat().st_mode | 0o055)
    run = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, name, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return run.stdout + run.stderr


def open_directory(directory: Path) -> None:
    Disk(directory)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Where a user without rights may look, too."""
    base = Path("/tmp") / f"varve-nobody-{os.getpid()}"
    base.mkdir(mode=0o755)
    yield base
    shutil.rmtree(base)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user, or mount")


@needs_root
@pytest.mark.parametrize("has_pages", [False, True])
def test_a_directory_that_may_not_be_written_is_refused_in_one_line(shared_directory: Path, has_pages: bool):
    pages = shared_directory / "pages"
    pages.mkdir()
    if has_pages:
        disk = Disk(pages)
        disk.store(*NAMES)
        disk.tier.close(10)
    before = {path.name: path.read_bytes() for path in pages.iterdir()}
    assert run_as_nobody("open_directory", pages) == f"refused: disk cache {pages}: Permission denied\n"
    assert {path.name: path.read_bytes() for path in pages.iterdir()} == before


def lose_the_right_to_write(directory: Path) -> None:
    """Of a directory of its own, while it serves."""
    disk = Disk(directory / "mine", quota=64 * 4096)
    disk.store(*range(15))
    (directory / "mine").chmod(0o500)
    for _ in range(3):
        assert not disk.tier.can_accept(STATE.object_bytes), "no segment of this size can be made"
    assert all(disk.is_good(name) for name in range(15))
    print(f"{disk.tier.statistics()['errors']} errors")
    (directory / "mine").chmod(0o700)
    disk.tier._health.resume()
    assert disk.store("s", form=STATE) == [TransferOutcome.DONE]
    disk.tier.close(10)


@needs_root
def test_a_directory_that_becomes_read_only_serves_on(shared_directory: Path):
    shared_directory.chmod(0o777)
    lines = run_as_nobody("lose_the_right_to_write", shared_directory).splitlines()
    (line,) = [line for line in lines if "disk cache" in line]
    assert line.startswith("disk cache: a segment cannot be made: [Errno 13] Permission denied")
    assert "1 errors" in lines


@pytest.fixture
def mounted(shared_directory: Path) -> Iterator[Callable[..., Path]]:
    """A small file system of one's own; its options."""
    place = shared_directory / "small"
    place.mkdir()

    def mount(options: str) -> Path:
        run = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False)
        if run.returncode:
            pytest.skip(f"nothing can be mounted here: {run.stderr!r}")
        return place

    yield mount
    subprocess.run(["umount", place], capture_output=True, check=False)


@needs_root
def test_a_file_system_that_becomes_read_only_refuses_a_start(mounted: Callable[..., Path]):
    place = mounted("size=4m")
    disk = Disk(place / "cache")
    disk.store(*NAMES)
    disk.tier.close(10)
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    with pytest.raises(DiskDirectoryError, match="Read-only file system"):
        Disk(place / "cache")
    subprocess.run(["mount", "-o", "remount,rw", place], check=True)
    again = Disk(place / "cache")
    assert found(again) == [True] * len(NAMES)
    again.tier.close(10)


@needs_root
def test_a_disk_that_is_really_full(mounted: Callable[..., Path], caplog: pytest.LogCaptureFixture):
    """Payload and index share the room that is left."""
    place = mounted("size=512k")
    disk = Disk(place / "cache", quota=8 << 20)
    outcomes: list[TransferOutcome] = []
    while TransferOutcome.FAILED not in outcomes:
        outcomes += disk.store(len(outcomes))
        assert len(outcomes) < 200
    kept = [name for name, outcome in enumerate(outcomes) if outcome is TransferOutcome.DONE]
    assert len(kept) > 20
    assert not disk.tier.can_accept(4096), "admission stops"
    assert all(disk.is_good(name) for name in kept), "hits go on"
    assert disk.tier.statistics()["errors"] >= 1
    (line,) = caplog.messages
    assert "disk cache:" in line
    assert "nothing is stored for 60 s" in line
    subprocess.run(["mount", "-o", "remount,size=8m", place], check=True)
    disk.tier._health.resume()
    assert disk.store("more") == [TransferOutcome.DONE]
    again = disk.reopen(quota=8 << 20)
    assert all(again.is_good(name) for name in [*kept, "more"])
    assert again.tier.check_integrity() == []
    again.tier.close(10)


@needs_root
def test_a_start_on_a_full_disk_keeps_what_is_there(mounted: Callable[..., Path]):
    place = mounted("size=1m")
    disk = Disk(place / "cache")
    disk.store(*NAMES)
    disk.tier.close(10)
    with contextlib.suppress(OSError), (place / "filler").open("wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    full = Disk(place / "cache")
    if full.tier.capacity().off_reason is None:
        assert found(full) == [True] * len(NAMES)
    full.tier.close(10)
    (place / "filler").unlink()
    again = Disk(place / "cache")
    assert found(again) == [True] * len(NAMES)
    again.tier.close(10)


# --- system calls that fail ----------------------------------------------------------------------------------------

FAULTS = {
    "disk.pwrite:fail:n=3": ("stores_failed", "a write failed: [Errno 5]"),
    "disk.pwrite:full:n=3": ("stores_failed", "a write failed: [Errno 28]"),
    "disk.pwrite:short:n=3": ("stores_failed", "a write failed: [Errno 5] half of the bytes"),
    "disk.fdatasync:fail:n=3": ("stores_failed", "the index could not be changed: [Errno 5]"),
    "disk.fdatasync:full:n=3": ("stores_failed", "the index could not be changed: [Errno 28]"),
    "disk.pread:fail:n=3": ("loads_failed", "a read failed: [Errno 5]"),
    "disk.pread:short:n=3": ("loads_failed", "a read failed: [Errno 5] half of the bytes"),
    "disk.pread:bitflip:n=3": ("loads_corrupt", "a damaged page in segment 1 is a miss"),
    "disk.pwrite:bitflip:n=3": ("loads_corrupt", "a damaged page in segment 1 is a miss"),
    "disk.pread:delay=0.05:n=3": ("loads_done", ""),
    "disk.fdatasync:delay=0.05:n=3": ("stores_done", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_system_call_that_fails_costs_one_object(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture):
    counter, line = FAULTS[fault]
    faults = FaultInjector(parse_faults(fault))
    disk = Disk(tmp_path, faults=faults)
    for name in NAMES:
        disk.store(name)
        disk.tier._health.resume()
    good = [disk.is_good(name) for name in NAMES]
    assert sum(good) == len(NAMES) - (not counter.endswith("done"))
    counts = disk.tier.statistics()
    assert counts[counter] == (1 if not counter.endswith("done") else len(NAMES))
    assert sum(faults.counts.values()) == 1
    assert [message for message in caplog.messages if line in message] == caplog.messages[: bool(line)]
    disk.tier._health.resume()
    assert disk.store(*NAMES) == [TransferOutcome.DONE] * len(NAMES)
    assert found(disk) == [True] * len(NAMES)
    again = disk.reopen()
    assert found(again) == [True] * len(NAMES)
    again.tier.close(10)


def test_an_index_of_another_namespace_only_is_served_empty(directory: Path):
    disk = Disk(directory, namespace=bytes(reversed(SPACE[:-1])) + b"x")
    assert found(disk) == [False] * len(NAMES)
    disk.tier.close(10)


def test_a_sync_that_hangs_turns_the_tier_off(tmp_path: Path):
    faults = FaultInjector(parse_faults("disk.fdatasync:hang:n=2"))
    disk = Disk(tmp_path, hang_s=0.05, faults=faults)
    disk.store("a")
    disk.tier.can_accept(4096)
    disk.tier.submit_store(disk.store_request("b"))
    time.sleep(0.2)
    disk.tier.tick()
    assert disk.tier.capacity().off_reason == "a sync or the index hangs"
    assert disk.has("a") == [False]
    faults.release()
    assert disk.wait().outcome is TransferOutcome.DONE
    again = disk.reopen()
    assert again.has("a", "b") == [True, True]
    again.tier.close(10)
