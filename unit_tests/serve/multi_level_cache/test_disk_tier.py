"""The disk tier on real files: hits after restarts and kills, quota, foreign namespaces, damage, errors."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from serve.multi_level_cache.disk_directory import DiskDirectoryError, load_or_create_key
from serve.multi_level_cache.disk_index import DiskIndex
from serve.multi_level_cache.disk_io import SegmentFile
from serve.multi_level_cache.disk_room import DiskOptions
from serve.multi_level_cache.disk_tier import DiskTier
from serve.multi_level_cache.fault_injector import FaultInjector
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import LoadRequest, StoreRequest, TransferOutcome, TransferResult
from unit_tests.serve.multi_level_cache.builders import FORMATS, FULL, STATE, page_name

ROOT = Path(__file__).parents[3]
SPACE = b"n" * 32


class Disk:
    """A tier in a directory, and the waiting that tests need."""

    def __init__(
        self,
        directory: Path,
        quota: int = 1 << 20,
        namespace: bytes = SPACE,
        faults: FaultInjector | None = None,
        **options: float,
    ) -> None:
        self.directory = directory
        settings = DiskOptions(directory, quota, segment_bytes=1 << 17, **options)  # type: ignore[arg-type]
        self.tier = DiskTier(settings, FORMATS, faults=faults)
        self.tier.serve_namespace(namespace)
        self.number = 0
        self.adopt()

    def adopt(self) -> None:
        """Until the directory is known."""
        deadline = time.monotonic() + 60
        while not self.tier.is_adopted and self.tier.capacity().off_reason is None:
            assert self.tier.poll_finished() == []
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def ticket(self) -> TierTicket:
        self.number += 1
        return TierTicket("t", self.number)

    def store_request(self, name: object, form: ObjectFormat = FULL, root: bytes = b"r" * 32) -> StoreRequest:
        key = PageKey(page_name(name), form.group)
        data = content(name, form)
        sums = object_checksums(data, form.unit_bytes, unit_seeds([key.name], form.group_index, form.unit_bytes)[0])
        views = [data[start : start + 4096] for start in range(0, len(data), 4096)]
        return StoreRequest(self.ticket(), key, b"p" * 32, root, form, views, sums)

    def store(self, *names: object, form: ObjectFormat = FULL, root: bytes = b"r" * 32) -> list[TransferOutcome]:
        outcomes = []
        for name in names:
            deadline = time.monotonic() + 60
            while not self.tier.can_accept(form.object_bytes) and time.monotonic() < deadline:
                self.tier.poll_finished()
                time.sleep(0.002)
            self.tier.submit_store(self.store_request(name, form, root))
            outcomes.append(self.wait().outcome)
        return outcomes

    def load(self, name: object, form: ObjectFormat = FULL) -> tuple[TransferResult, np.ndarray]:
        data = np.zeros(form.object_bytes, dtype=np.uint8)
        views = [data[start : start + 4096] for start in range(0, len(data), 4096)]
        self.tier.submit_load(LoadRequest(self.ticket(), PageKey(page_name(name), form.group), form, views))
        return self.wait(), data

    def wait(self) -> TransferResult:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if results := self.tier.poll_finished():
                (result,) = results
                return result
            time.sleep(0.001)
        pytest.fail("no result")

    def has(self, *names: object, form: ObjectFormat = FULL) -> list[bool]:
        return self.tier.contains([PageKey(page_name(name), form.group) for name in names])

    def reopen(self, **options: object) -> "Disk":
        self.tier.close(10)
        return Disk(self.directory, **options)  # type: ignore[arg-type]

    def is_good(self, name: object, form: ObjectFormat = FULL) -> bool:
        result, data = self.load(name, form)
        return result.outcome is TransferOutcome.DONE and bool((data == content(name, form)).all())


def content(name: object, form: ObjectFormat) -> np.ndarray:
    seed = int.from_bytes(page_name(name, form.group)[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, form.object_bytes, dtype=np.uint8)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "cache")
    yield made
    made.tier.close(10)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


def test_what_is_stored_is_loaded_with_its_checksums(disk: Disk):
    assert disk.has("a") == [False]
    assert disk.store("a") == [TransferOutcome.DONE]
    assert disk.store("a", form=STATE) == [TransferOutcome.DONE]
    assert disk.has("a", "b") == [True, False]
    for form in FORMATS:
        result, data = disk.load("a", form)
        assert (data == content("a", form)).all()
        assert (result.checksums == disk.store_request("a", form).checksums).all()
    assert disk.load("b")[0].outcome is TransferOutcome.MISSING
    assert disk.tier.check_integrity() == []


def test_storing_again_is_done_without_work(disk: Disk):
    disk.store("a")
    assert disk.store("a") == [TransferOutcome.DONE]
    assert disk.tier.capacity().num_objects == 1


def test_a_restart_serves_hits(disk: Disk):
    disk.store(*range(20))
    disk.store("s", form=STATE)
    again = disk.reopen()
    assert again.has(*range(20)) == [True] * 20
    assert all(again.is_good(name) for name in range(20))
    assert again.is_good("s", STATE)
    again.tier.close(10)


def test_bytes_that_do_not_match_when_stored_are_refused_as_corrupt(disk: Disk):
    request = disk.store_request("a")
    request.views[0][5] ^= 1
    disk.tier.can_accept(4096)
    disk.tier.submit_store(request)
    assert disk.wait().outcome is TransferOutcome.CORRUPT
    assert disk.has("a") == [False]


@pytest.mark.parametrize("damage", ["flip", "zero", "truncate", "delete", "swap"])
def test_damaged_bytes_are_a_miss_for_those_objects_only(disk: Disk, damage: str, caplog: pytest.LogCaptureFixture):
    disk.store(*range(8))
    disk.tier.close(10)
    (path,) = segments(disk.directory)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[4096 * 3 + 77] ^= 4
    elif damage == "zero":
        data[4096 * 3 : 4096 * 4] = bytes(4096)
    elif damage == "swap":
        data[4096 * 3 : 4096 * 5] = data[4096 * 4 : 4096 * 5] + data[4096 * 3 : 4096 * 4]
    path.write_bytes(data[: 4096 * 3 + 100] if damage == "truncate" else data)
    if damage == "delete":
        path.unlink()
    bad = {"flip": {3}, "zero": {3}, "swap": {3, 4}, "truncate": set(range(3, 8)), "delete": set(range(8))}[damage]
    again = Disk(disk.directory)
    assert {name for name in range(8) if not again.is_good(name)} == bad
    assert again.has(*range(8)) == [name not in bad for name in range(8)]
    assert {key.name for key in again.tier.poll_evicted()} == {page_name(name) for name in bad}
    assert [message for message in caplog.messages if "damaged" in message] == caplog.messages[:1]
    again.store(*bad)
    assert all(again.is_good(name) for name in range(8))
    assert again.tier.check_integrity() == []
    again.tier.close(10)


@pytest.mark.parametrize("damage", [b"", b"not a database at all, whatever its name says" * 100])
def test_a_damaged_index_is_an_empty_cache(disk: Disk, damage: bytes, caplog: pytest.LogCaptureFixture):
    disk.store(*range(3))
    disk.tier.close(10)
    for path in disk.directory.glob("index.sqlite*"):
        path.unlink()
    (disk.directory / "index.sqlite").write_bytes(damage)
    again = Disk(disk.directory)
    assert again.has(*range(3)) == [False] * 3
    assert segments(disk.directory) == [], "files that nobody knows are deleted"
    assert [line.split(":")[0] for line in caplog.messages] == ["disk cache"] * (2 if damage else 1)
    assert again.tier.statistics().get("index_resets", 0) == (1 if damage else 0)
    assert again.store("a") == [TransferOutcome.DONE]
    again.tier.close(10)


def test_the_quota_holds_and_the_least_recently_used_go(tmp_path: Path):
    disk = Disk(tmp_path, quota=64 * 4096)
    for name in range(200):
        assert disk.store(name) == [TransferOutcome.DONE]
        disk.tier.touch([PageKey(page_name(0), "full")])
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 64 * 4096
    assert disk.has(0, 1, 199) == [True, False, True]
    assert 40 < disk.tier.capacity().num_objects <= 64
    assert all(disk.is_good(name) for name in range(200) if disk.has(name) == [True])
    assert len(disk.tier.poll_evicted()) == 200 - disk.tier.capacity().num_objects
    assert disk.tier.check_integrity() == []
    disk.tier.close(10)


def test_groups_share_a_small_quota(tmp_path: Path):
    disk = Disk(tmp_path, quota=64 * 4096)
    for name in range(100):
        disk.store(name)
    disk.store("s", form=STATE)
    assert disk.is_good("s", STATE)
    assert disk.has(99) == [True]
    disk.tier.close(10)


def test_another_namespace_is_a_miss_and_goes_first(tmp_path: Path):
    disk = Disk(tmp_path, quota=64 * 4096)
    disk.store(*range(40))
    other = disk.reopen(quota=64 * 4096, namespace=b"o" * 32)
    assert other.has(*range(40)) == [False] * 40
    other.store(*range(100, 112))
    assert other.tier.statistics()["foreign_segments"] == 3
    other.store(*range(112, 150))
    assert all(other.is_good(name) for name in range(100, 150))
    assert other.tier.statistics()["foreign_segments"] < 3
    back = other.reopen(quota=64 * 4096)
    kept = [name for name in range(40) if back.has(name) == [True]]
    assert all(back.is_good(name) for name in kept)
    back.tier.close(10)


def test_a_smaller_quota_shrinks_at_start(tmp_path: Path):
    disk = Disk(tmp_path, quota=64 * 4096)
    disk.store(*range(64))
    small = disk.reopen(quota=16 * 4096)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 16 * 4096
    assert 0 < small.tier.capacity().num_objects <= 16
    small.tier.close(10)


def test_a_flush_by_root_is_for_ever(disk: Disk):
    disk.store("mine", root=b"m" * 32)
    disk.store("other", root=b"o" * 32)
    disk.tier.evict_root(b"m" * 32)
    assert disk.has("mine", "other") == [False, True]
    again = disk.reopen()
    assert again.has("mine", "other") == [False, True]
    again.tier.evict_root(None)
    last = again.reopen()
    assert last.has("other") == [False]
    assert last.store("other") == [TransferOutcome.DONE]
    last.tier.close(10)


def test_a_store_in_progress_is_not_published_after_a_flush(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    write = SegmentFile.write
    monkeypatch.setattr(SegmentFile, "write", lambda *arguments: (gate.wait(10), write(*arguments)))
    disk.tier.can_accept(4096)
    disk.tier.submit_store(disk.store_request("a"))
    disk.tier.evict_root(None)
    gate.set()
    assert disk.wait().outcome is TransferOutcome.REFUSED
    again = disk.reopen()
    assert again.has("a") == [False]
    again.tier.close(10)


def test_bytes_are_written_and_synced_before_their_row(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    steps: list[str] = []
    for kind, name in ((SegmentFile, "write"), (SegmentFile, "sync"), (DiskIndex, "change")):
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, real=real, name=name: (steps.append(name), real(*args)))
    disk.store("a")
    assert steps == ["write", "sync", "change"]


def test_a_slot_is_free_only_after_its_row_and_its_readers_are_gone(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    disk.store("a")
    free = disk.tier._space.num_free(4096)
    begun, gate = threading.Event(), threading.Event()
    read = SegmentFile.read
    monkeypatch.setattr(SegmentFile, "read", lambda *arguments: (begun.set(), gate.wait(60), read(*arguments)))
    views = [np.zeros(4096, dtype=np.uint8)]
    disk.tier.submit_load(LoadRequest(disk.ticket(), PageKey(page_name("a"), "full"), FULL, views))
    disk.tier.evict([PageKey(page_name("a"), "full")])
    assert begun.wait(60)
    assert disk.tier.poll_finished() == []
    assert disk.tier._space.num_free(4096) == free, "a read goes on"
    gate.set()
    assert disk.wait().outcome is TransferOutcome.DONE
    deadline = time.monotonic() + 60
    while disk.tier._space.num_free(4096) == free and time.monotonic() < deadline:
        disk.tier.poll_finished()
        time.sleep(0.002)
    assert disk.tier._space.num_free(4096) == free + 1
    again = disk.reopen()
    assert again.has("a") == [False]
    again.tier.close(10)


def test_a_full_disk_stops_admission_and_nothing_else(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    disk.store("a")

    def full(file: SegmentFile, buffer: np.ndarray, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SegmentFile, "write", full)
    assert disk.store("b") == [TransferOutcome.FAILED]
    assert not disk.tier.can_accept(4096)
    assert disk.is_good("a")
    assert disk.tier.statistics()["errors"] == 1
    monkeypatch.undo()
    disk.tier._health.resume()
    assert disk.store("b") == [TransferOutcome.DONE]
    assert disk.tier.check_integrity() == []


def test_reads_that_hang_turn_the_tier_off_and_still_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path, hang_s=0.05, num_threads=2)
    disk.store("a", "b", "c")
    gate = threading.Event()
    read = SegmentFile.read
    monkeypatch.setattr(SegmentFile, "read", lambda *arguments: (gate.wait(60), read(*arguments)))
    views = [np.zeros(4096, dtype=np.uint8)]
    for name in ("a", "b", "c"):
        disk.tier.submit_load(LoadRequest(disk.ticket(), PageKey(page_name(name), "full"), FULL, views))
    deadline = time.monotonic() + 30
    while disk.tier._transfers.num_hung(0.05) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    disk.tier.tick()
    assert "hang" in str(disk.tier.capacity().off_reason)
    assert disk.has("a", "b", "c") == [False] * 3
    assert not disk.tier.can_accept(4096)
    assert [result.outcome for result in disk.tier.poll_finished()] == [TransferOutcome.REFUSED], "the queued one"
    gate.set()
    disk.tier.close(10)
    assert [result.outcome for result in disk.tier.poll_finished()] == [TransferOutcome.DONE] * 2


def test_last_uses_survive_a_restart(tmp_path: Path):
    disk = Disk(tmp_path, quota=64 * 4096)
    disk.store(*range(50))
    disk.tier.touch([PageKey(page_name(name), "full") for name in range(10)])
    again = disk.reopen(quota=64 * 4096)
    again.store(*range(100, 140))
    assert again.has(*range(10)) == [True] * 10
    again.tier.close(10)


def test_a_directory_serves_one_server(disk: Disk):
    with pytest.raises(DiskDirectoryError, match="another server"):
        Disk(disk.directory)


def test_the_key_is_made_once_and_private(tmp_path: Path):
    key = load_or_create_key(tmp_path / "cache")
    assert load_or_create_key(tmp_path / "cache") == key
    path = tmp_path / "cache/key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(DiskDirectoryError, match="readable by others"):
        load_or_create_key(tmp_path / "cache")
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(DiskDirectoryError, match="5 bytes"):
        load_or_create_key(tmp_path / "cache")


WRITER = """
import sys
from pathlib import Path
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk
disk = Disk(Path(sys.argv[1]), quota=64 * 4096)
name = int(sys.argv[2])
while True:
    if disk.store(name)[0].value == "done":
        print(name, flush=True)
    name += 1
"""


def test_kills_at_any_moment_lose_nothing_that_was_done_and_serve_nothing_wrong(tmp_path: Path):
    written: list[int] = []
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * attempt)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        mine = [int(process.stdout.readline()) for _ in range(30 + 17 * attempt)]
        process.kill()
        mine += [int(line) for line in process.stdout.read().splitlines() if line]
        process.wait()
        written = mine
    disk = Disk(tmp_path, quota=64 * 4096)
    recent = written[-30:]
    assert disk.has(*recent) == [True] * 30
    present = [name for base in range(4) for name in range(1000 * base, 1000 * base + 500) if disk.has(name) == [True]]
    assert all(disk.is_good(name) for name in present)
    assert disk.tier.check_integrity() == []
    disk.tier.close(10)


def test_evicted_objects_leave_when_their_rows_are_gone(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store("a", "b")
    disk.load("a")
    found = disk.tier.statistics()
    assert (found["bytes_stored"], found["bytes_loaded"], found["objects_bytes"]) == (8192, 4096, 8192)
    assert (sum(found["store_times"]["counts"]), sum(found["load_times"]["counts"])) == (2, 1)
    assert (found["queued"], found["in_flight"], found["leaving"]) == (0, 0, 0)
    disk.tier.evict_root(None)
    assert disk.tier.num_leaving() == 2
    deadline = time.monotonic() + 60
    while disk.tier.num_leaving():
        assert time.monotonic() < deadline
        disk.tier.poll_finished()
    disk.tier.close(10)
    assert DiskIndex(tmp_path).objects(1) == []


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    load_or_create_key(tmp_path)
    disk = Disk(tmp_path)
    disk.store("a")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"index.sqlite", "index.sqlite-wal", "key", "lock", "segment-00000001"} <= names
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    disk.tier.close(10)
