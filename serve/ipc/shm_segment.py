"""Shared memory without names: memfd segments that children inherit as file descriptors.

Create xor attach: the creator sizes and seals the segment and stamps the header; an attacher validates it and never
writes the header. Nothing appears under /dev/shm, so nothing is left behind and two servers cannot collide. Pages that
nobody touches cost no memory.
"""

import fcntl
import math
import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

HEADER_BYTES = 4096
_HEADER = np.dtype([("magic", "S8"), ("version", "<u4"), ("size", "<u8"), ("generation", "<u8")])


class SegmentError(Exception):
    """A file descriptor is not the segment that it should be; one line says why."""


@dataclass(frozen=True)
class SegmentKind:
    """What a segment holds. magic: 1 to 8 bytes; version: of the payload's layout."""

    magic: bytes
    version: int


class Segment:
    """A mapped segment of `size` bytes: a header page, then the payload."""

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.size = len(mapping)
        self._mapping = mapping
        self._header = np.frombuffer(mapping, dtype=_HEADER, count=1)

    @classmethod
    def create(cls, kind: SegmentKind, payload_bytes: int, generation: int = 0) -> "Segment":
        """Make and stamp a zeroed segment. Raises OSError when the kernel refuses."""
        size = HEADER_BYTES + payload_bytes
        fd = os.memfd_create(f"varve-{kind.magic.decode()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # An attacher must never be able to shrink what others have mapped (they would get SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(fd, mmap.mmap(fd, size))
        except (OSError, OverflowError):
            os.close(fd)
            raise
        segment._header[0] = (kind.magic, kind.version, size, generation)
        return segment

    @classmethod
    def attach(cls, fd: int, kind: SegmentKind, read_only: bool = False) -> "Segment":
        """Map a segment that exists. Raises SegmentError unless magic, version and size are right."""
        try:
            size = os.fstat(fd).st_size
        except OSError as error:
            raise SegmentError(f"file descriptor {fd} is not a segment: {error.strerror}") from error
        if size < HEADER_BYTES:
            raise SegmentError(f"segment of {size} bytes is smaller than its header")
        access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
        try:
            mapping = mmap.mmap(fd, size, access=access)
        except OSError as error:
            raise SegmentError(f"file descriptor {fd} cannot be mapped: {error.strerror}") from error
        segment = cls(fd, mapping)
        segment._validate(kind, size)
        return segment

    def _validate(self, kind: SegmentKind, size: int) -> None:
        header = self._header[0]
        if header["magic"] != kind.magic:
            raise SegmentError(f"segment has magic {bytes(header['magic'])!r}, expected {kind.magic!r}")
        if header["version"] != kind.version:
            raise SegmentError(f"segment has layout version {header['version']}, expected {kind.version}")
        if header["size"] != size:
            raise SegmentError(f"segment has {size} bytes, its header says {header['size']}")

    @property
    def generation(self) -> int:
        """Stamped by the creator."""
        return int(self._header[0]["generation"])

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """A view of payload bytes [offset, offset + size of the array). Raises SegmentError past the end."""
        element = np.dtype(dtype)
        length = math.prod(shape) * element.itemsize
        if offset < 0 or HEADER_BYTES + offset + length > self.size:
            raise SegmentError(f"array of {length} bytes at {offset} leaves a segment of {self.size} bytes")
        return np.ndarray(shape, element, self._mapping, HEADER_BYTES + offset)

    def close(self) -> None:
        """Close the descriptor. The memory goes when the last view of it goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
