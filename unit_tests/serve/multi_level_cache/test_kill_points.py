"""SIGKILL at every kill point of the disk tier: what is on disk afterwards is right, whole and within its quota."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serve.multi_level_cache.disk_check import check_directory
from serve.multi_level_cache.disk_directory import load_or_create_key
from serve.multi_level_cache.fault_injector import KILL_POINTS
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import LoadRequest, TransferOutcome
from unit_tests.serve.multi_level_cache.kill_bench import BY_GROUP, SEGMENT_BYTES, content
from unit_tests.serve.multi_level_cache.test_disk_tier import ROOT, Disk

NAMESPACES = (b"a" * 32, b"b" * 32)
TIGHT, ROOMY = 6 * SEGMENT_BYTES, 200 * SEGMENT_BYTES
# The n-th passage of each point, one life after the other in one directory. A life passes the others once.
MOMENTS = {point: (1, 2, 7) for point in KILL_POINTS if point.startswith("disk.")} | {
    **dict.fromkeys(("disk.before_adoption", "disk.after_adoption"), (1, 1)),
    **dict.fromkeys(("disk.before_last_use", "disk.after_last_use"), (1, 2)),
    **dict.fromkeys(("disk.before_segment_removal", "disk.after_segment_removal", "disk.after_segment_delete"), (1, 2)),
}
"""More than 50 moments."""
DEMANDING = ("removal", "last_use", "delete")
"""Points that only a small quota leads to, and flushes."""


@pytest.fixture(scope="module")
def lives() -> Iterator["subprocess.Popen[str]"]:
    """Runs lives, one a line."""
    command = [sys.executable, "-m", "unit_tests.serve.multi_level_cache.kill_bench"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_there_are_fifty_moments():
    assert set(MOMENTS) == {point for point in KILL_POINTS if point.startswith("disk.")}
    assert sum(map(len, MOMENTS.values())) >= 50


@pytest.mark.parametrize("point", MOMENTS)
def test_a_kill_at_this_point_costs_nothing_that_was_safe(lives: "subprocess.Popen[str]", tmp_path: Path, point: str):
    directory = tmp_path / "pages"
    load_or_create_key(directory)
    is_tight = any(word in point for word in DEMANDING)
    quota, mine, other = TIGHT if is_tight else ROOMY, *NAMESPACES
    for passage in MOMENTS[point]:
        if "segment_removal" in point or "delete" in point:  # of segments of another model, when room is needed
            live_until_killed(lives, directory, "disk.before_commit", 60, quota, other, is_tight)
        live_until_killed(lives, directory, point, passage, quota, mine, is_tight)
        durable = {PageKey(bytes.fromhex(line[0]), line[1]) for line in map(str.split, _lines(tmp_path / "durable"))}
        inspect(directory, quota, mine, durable if not is_tight else set())


def live_until_killed(
    lives: "subprocess.Popen[str]",
    directory: Path,
    point: str,
    passage: int,
    quota: int,
    namespace: bytes,
    flushes: bool,
) -> None:
    """One life; it must end at the point, and by nothing else."""
    assert lives.stdin is not None
    assert lives.stdout is not None
    life = [str(directory), f"{point}:kill:n={passage}", quota, namespace.hex(), flushes]
    print(json.dumps(life), file=lives.stdin, flush=True)
    code, words = int(lives.stdout.readline()), (directory.parent / "stderr").read_text()
    assert code == -signal.SIGKILL, (code, words)
    assert words.splitlines()[-1] == f"varve: fault injected: killed at {point}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def inspect(directory: Path, quota: int, namespace: bytes, durable: set[PageKey]) -> None:
    """The directory as the next start finds it. durable: what must be there."""
    for problem in check_directory(directory).problems:
        assert "is in no row of the index" in problem.text, "a file may be there too early or too long, nothing else"
    disk = Disk(directory, quota, namespace)
    files = {path: path.stat().st_size for path in directory.glob("segment-*")}
    assert sum(files.values()) <= quota
    assert len(files) == len(disk.tier._room.files) + len(disk.tier._room.foreign), "a file without a row"
    for segment in disk.tier._space.segments.values():
        assert len(segment.free) + len(segment.objects) == segment.row.num_slots, "a slot is lost"
    assert disk.tier.check_integrity() == []
    found = {each.key for each in disk.tier._space}
    assert durable <= found
    for key in found:
        data = np.zeros(BY_GROUP[key.group].object_bytes, dtype=np.uint8)
        views = [data[start : start + 4096] for start in range(0, len(data), 4096)]
        disk.tier.submit_load(LoadRequest(TierTicket("inspect", 1), key, BY_GROUP[key.group], views))
        assert disk.wait().outcome is TransferOutcome.DONE
        assert (data == content(key)).all(), "wrong bytes"
    assert disk.store("later") == [TransferOutcome.DONE]
    assert disk.is_good("later")
    disk.tier.evict_root(b"r" * 32)
    disk.tier.close(10)
