"""Every command has one answer, whatever happens to the index."""

import queue
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from serve.multi_level_cache.disk_committer import (
    CommitLastUse,
    CommitRemoval,
    CommitSegment,
    Committed,
    DiskCommitter,
    Event,
    IndexUnusable,
)
from serve.multi_level_cache.disk_index import DiskIndex, SegmentRow
from serve.multi_level_cache.secondary_tier import TransferOutcome
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk


def test_what_is_no_error_of_the_disk_fails_all_commands_from_there_on(tmp_path: Path):
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    may_open = threading.Event()

    class Broken(DiskIndex):
        def set_last_use(self, uses: Iterable[tuple[float, int, int]]) -> None:
            raise ValueError("a bug")

    def open_index() -> DiskIndex:
        may_open.wait(60)  # so that all commands come in one batch
        return Broken(tmp_path)

    committer = DiskCommitter(open_index, events.put)
    commands = [CommitSegment(SegmentRow(1, b"n", 4096, 8)), CommitLastUse([(1.0, 1, 1)]), CommitRemoval([(1, 1)])]
    for command in commands:
        committer.submit(command)
    may_open.set()
    told = [events.get(timeout=60) for _ in range(4)]
    committer.submit(commands[0])
    assert told == [
        Committed(commands[0]),
        IndexUnusable("ValueError: a bug"),
        Committed(commands[1], "there is no index"),
        Committed(commands[2], "there is no index"),
    ]
    assert events.get(timeout=60) == Committed(commands[0], "there is no index")
    assert committer.close(60)
    assert not committer.is_hung(-1.0)


def fail(*arguments: object) -> None:
    raise MemoryError("no more")


def test_a_tier_whose_index_thread_fails_lets_go_of_its_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path)
    monkeypatch.setattr(DiskIndex, "change", fail)
    assert disk.store("a") == [TransferOutcome.FAILED]
    assert disk.tier.capacity().off_reason == "the index cannot be used: MemoryError: no more"
    assert not disk.tier.can_accept(4096)
    disk.tier.close(10)


def test_a_tier_whose_index_cannot_be_opened_for_any_reason_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DiskIndex, "_open", fail)
    disk = Disk(tmp_path)
    assert disk.tier.capacity().off_reason == "the index cannot be used: MemoryError: no more"
    disk.tier.close(10)
