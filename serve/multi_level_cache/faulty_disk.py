"""Segment files and an index whose system calls fail, dawdle or end the process as the fault injector says."""

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from serve.multi_level_cache.disk_index import DiskIndex, ObjectRow, SegmentRow
from serve.multi_level_cache.disk_io import SegmentFile, ShortTransferError
from serve.multi_level_cache.fault_injector import FaultAction, FaultInjector, FaultRule
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.secondary_tier import Bytes


class FaultyFile(SegmentFile):
    """Sites disk.pread, disk.pwrite and disk.fdatasync, and the kill points around each."""

    def __init__(self, path: Path, size: int, faults: FaultInjector) -> None:
        self._faults = faults
        faults.reach("disk.before_segment_file")
        super().__init__(path, size)
        faults.reach("disk.after_segment_file")

    def read(self, buffers: Sequence[Bytes], offset: int) -> None:
        self._faults.reach("disk.before_pread")
        rule = self._suffer("disk.pread")
        if rule is not None and rule.action is FaultAction.SHORT:
            super().read([_first_half(buffers[0])], offset)
            raise ShortTransferError(errno.EIO, "half of the bytes, by an injected fault")
        super().read(buffers, offset)
        if rule is not None and rule.action is FaultAction.BITFLIP:
            self._faults.flip_bit(buffers[-1])
        self._faults.reach("disk.after_pread")

    def write(self, buffer: Bytes, offset: int) -> None:
        self._faults.reach("disk.before_pwrite")
        rule = self._suffer("disk.pwrite")
        if rule is not None and rule.action is FaultAction.SHORT:
            super().write(_first_half(buffer), offset)
            raise ShortTransferError(errno.EIO, "half of the bytes, by an injected fault")
        if rule is not None and rule.action is FaultAction.BITFLIP:
            self._faults.flip_bit(buffer)
        super().write(buffer, offset)
        self._faults.reach("disk.after_pwrite")

    def sync(self) -> None:
        self._faults.reach("disk.before_fdatasync")
        self._suffer("disk.fdatasync")
        super().sync()
        self._faults.reach("disk.after_fdatasync")

    def delete(self) -> None:
        super().delete()
        self._faults.reach("disk.after_segment_delete")

    def _suffer(self, site: str) -> FaultRule | None:
        rule = self._faults.decide(site)
        if rule is not None:
            self._faults.suffer(rule)
        return rule


def _first_half(buffer: Bytes) -> Bytes:
    """Of an aligned buffer, an aligned part: nothing of one that is a single block."""
    half: Bytes = np.asarray(buffer[: len(buffer) // 8192 * 4096])
    return half


class FaultyIndex(DiskIndex):
    """Kill points around each change."""

    def __init__(self, directory: Path, faults: FaultInjector) -> None:
        self._faults = faults
        super().__init__(directory)

    def delete_orphans(self) -> None:
        self._faults.reach("disk.before_adoption")
        super().delete_orphans()

    def set_formats(self, namespace: bytes, formats: Iterable[ObjectFormat]) -> None:
        super().set_formats(namespace, formats)
        self._faults.reach("disk.after_adoption")

    def add_segment(self, segment: SegmentRow) -> None:
        self._faults.reach("disk.before_segment_row")
        super().add_segment(segment)
        self._faults.reach("disk.after_segment_row")

    def remove_segment(self, number: int) -> None:
        self._faults.reach("disk.before_segment_removal")
        super().remove_segment(number)
        self._faults.reach("disk.after_segment_removal")

    def change(self, added: Sequence[ObjectRow], removed: Iterable[tuple[int, int]]) -> None:
        name = "commit" if added else "removal"
        self._faults.reach(f"disk.before_{name}")
        super().change(added, removed)
        self._faults.reach(f"disk.after_{name}")

    def set_last_use(self, uses: Iterable[tuple[float, int, int]]) -> None:
        self._faults.reach("disk.before_last_use")
        super().set_last_use(uses)
        self._faults.reach("disk.after_last_use")
