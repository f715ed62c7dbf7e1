import os
import subprocess
import sys

import numpy as np
import pytest

from serve.ipc.shm_segment import HEADER_BYTES, Segment, SegmentError, SegmentKind

KIND = SegmentKind(magic=b"testseg", version=3)


def test_attach_sees_what_the_creator_wrote() -> None:
    created = Segment.create(KIND, 8192, generation=7)
    created.array(16, (4,), "<u4")[:] = [1, 2, 3, 4]
    attached = Segment.attach(os.dup(created.fd), KIND)
    assert attached.generation == 7
    assert attached.size == HEADER_BYTES + 8192
    assert attached.array(16, (4,), "<u4").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "message"),
    [(SegmentKind(b"other", 3), "magic"), (SegmentKind(b"testseg", 4), "version 3, expected 4")],
)
def test_attach_rejects_another_kind(kind: SegmentKind, message: str) -> None:
    created = Segment.create(KIND, 100)
    with pytest.raises(SegmentError, match=message):
        Segment.attach(created.fd, kind)


def test_attach_rejects_what_is_no_segment() -> None:
    with pytest.raises(SegmentError, match="not a segment"):
        Segment.attach(9999, KIND)
    empty = os.memfd_create("empty")
    with pytest.raises(SegmentError, match="smaller than its header"):
        Segment.attach(empty, KIND)
    os.close(empty)


def test_attach_rejects_a_size_that_differs_from_the_header() -> None:
    fd = os.memfd_create("copy")
    created = Segment.create(KIND, 100)
    os.write(fd, os.pread(created.fd, HEADER_BYTES, 0) + bytes(200))
    with pytest.raises(SegmentError, match="its header says"):
        Segment.attach(fd, KIND)
    os.close(fd)


def test_attach_leaves_every_byte_as_it_was() -> None:
    created = Segment.create(KIND, 4096)
    before = os.pread(created.fd, created.size, 0)
    Segment.attach(os.dup(created.fd), KIND).close()
    assert os.pread(created.fd, created.size, 0) == before


def test_a_segment_that_cannot_be_had_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"Cannot allocate memory|File too large|Invalid argument"):
        Segment.create(KIND, 1 << 62)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_no_attacher_can_shrink_the_segment() -> None:
    created = Segment.create(KIND, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(created.fd, 10)


def test_read_only_views_refuse_writes() -> None:
    created = Segment.create(KIND, 64)
    view = Segment.attach(os.dup(created.fd), KIND, read_only=True).array(0, (8,), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize(("offset", "length"), [(0, 65), (60, 8), (-1, 4)])
def test_views_stay_inside_the_payload(offset: int, length: int) -> None:
    created = Segment.create(KIND, 64)
    with pytest.raises(SegmentError, match="leaves a segment"):
        created.array(offset, (length,), np.uint8)


def test_untouched_pages_cost_no_memory() -> None:
    created = Segment.create(KIND, 8 << 30)
    created.array(4 << 30, (1,), np.uint8)[0] = 1
    assert os.fstat(created.fd).st_blocks * 512 < 1 << 20


def test_a_view_outlives_close() -> None:
    created = Segment.create(KIND, 64)
    view = created.array(0, (8,), np.uint8)
    created.close()
    created.close()
    view[0] = 5
    assert view[0] == 5


def test_another_process_attaches_by_descriptor() -> None:
    created = Segment.create(KIND, 64)
    program = (
        "import sys; from serve.ipc.shm_segment import *;"
        "s = Segment.attach(int(sys.argv[1]), SegmentKind(b'testseg', 3)); s.array(0, (2,), '<u8')[1] = 77"
    )
    subprocess.run([sys.executable, "-c", program, str(created.fd)], pass_fds=[created.fd], check=True)
    assert created.array(0, (2,), "<u8").tolist() == [0, 77]
