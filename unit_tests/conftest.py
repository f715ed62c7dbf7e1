"""Without a GPU Triton's kernels run in the interpreter (set before anything imports it); tests close what they map."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.ipc.shm_segment import Segment

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def closed_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the segments that a test makes: thousands of tests share the descriptors of one process."""
    made: list[tuple[Segment, int]] = []
    create = Segment.create.__func__  # type: ignore[attr-defined]

    def tracked(cls: type[Segment], *args: object, **kwargs: object) -> Segment:
        segment = create(cls, *args, **kwargs)
        made.append((segment, os.fstat(segment.fd).st_ino))
        return segment

    monkeypatch.setattr(Segment, "create", classmethod(tracked))
    yield
    for segment, inode in made:
        with contextlib.suppress(OSError):  # closed by whoever attached to the same descriptor
            if segment.fd >= 0 and os.fstat(segment.fd).st_ino == inode:
                segment.close()
