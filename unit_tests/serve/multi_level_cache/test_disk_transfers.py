"""Reads of neighbours are one request, straight into aligned slots, and fail each for itself."""

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from serve.multi_level_cache import disk_transfers
from serve.multi_level_cache.disk_io import SegmentFile
from serve.multi_level_cache.disk_space import DiskObject
from serve.multi_level_cache.disk_transfers import Read, ReadQueue
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import LoadRequest, TransferOutcome
from unit_tests.serve.multi_level_cache.builders import FULL, STATE, page_name
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk, content


def aligned_views(count: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, count * 4096), dtype=np.uint8).reshape(count, 4096)


def read(file: SegmentFile, slot: int, view: np.ndarray) -> Read:
    key = PageKey(page_name(slot), "full")
    target = DiskObject(key, b"r" * 32, 1, slot, np.zeros(2, np.uint64), 0.0)
    return Read(LoadRequest(TierTicket("t", slot), key, FULL, [view]), target, file, 4096)


def slots(run: list[Read]) -> list[int]:
    return [each.target.slot for each in run]


def test_neighbours_in_order_are_taken_together(tmp_path: Path):
    file, other = SegmentFile(tmp_path / "a", 1 << 16), SegmentFile(tmp_path / "b", 1 << 16)
    memory, reads = aligned_views(9), ReadQueue()
    crooked = np.zeros(8192, np.uint8)[1:4097]
    for position, (of, slot) in enumerate([(file, 1), (file, 2), (file, 3), (file, 5), (other, 6), (file, 8)]):
        reads.put(read(of, slot, memory[position]))
    reads.put(read(file, 9, crooked))
    taken = [slots(reads.take(most_bytes=2 * 4096)) for _ in range(7)]
    assert taken == [[1, 2], [3], [5], [6], [8], [9], []]
    file.close()
    other.close()


@pytest.mark.parametrize("bad", [None, 3])
def test_a_chain_is_read_by_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int | None):
    disk = Disk(tmp_path, num_threads=1)
    disk.store(*range(8))
    disk.store("s", form=STATE)
    requests: list[int] = []
    plain = SegmentFile.read

    def counted(file: SegmentFile, buffers: list[np.ndarray], offset: int) -> None:
        requests.append(len(buffers))
        if bad is not None and offset <= bad * 4096 < offset + 4096 * len(buffers):
            raise OSError(errno.EIO, "bad sector")
        plain(file, buffers, offset)

    monkeypatch.setattr(SegmentFile, "read", counted)
    memory = aligned_views(8)
    for name in range(8):  # all are queued before a thread takes the first
        key = PageKey(page_name(name), "full")
        request = LoadRequest(TierTicket("t", 100 + name), key, FULL, [memory[name]])
        target = disk.tier._space.find(key)
        assert target is not None
        target.num_readers += 1
        disk.tier._transfers._reads.put(Read(request, target, disk.tier._room.files[target.segment], 4096))
    disk.tier._transfers._read_some(np.zeros(4096, np.uint8))
    outcomes = {result.ticket.number - 100: result.outcome for result in disk.tier.poll_finished()}
    assert requests[0] == 8
    for name in range(8):
        is_bad = name == bad
        assert outcomes[name] is (TransferOutcome.FAILED if is_bad else TransferOutcome.DONE)
        assert is_bad or (memory[name] == content(name, FULL)).all()
    assert len(requests) == (1 if bad is None else 9)
    monkeypatch.undo()
    assert disk.is_good("s", STATE)
    disk.tier.close(10)


def test_a_transfer_that_fails_by_a_mistake_has_its_one_answer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def mistake(*arguments: object) -> bool:
        raise ValueError("a bug")

    disk = Disk(tmp_path, num_threads=1)
    disk.store(*range(3))
    with monkeypatch.context() as patch:
        patch.setattr(disk_transfers, "_matches", mistake)
        assert disk.store("new") == [TransferOutcome.REFUSED]
        memory = aligned_views(2)
        for name in range(2):
            key = PageKey(page_name(name), "full")
            disk.tier.submit_load(LoadRequest(TierTicket("t", 100 + name), key, FULL, [memory[name]]))
        disk.tier._transfers.close(60)
        assert [result.outcome for result in disk.tier.poll_finished()] == [TransferOutcome.FAILED] * 2
    assert disk.tier.statistics()["in_flight"] == 0
    assert disk.tier.check_integrity() == []
    disk.tier.close(10)
