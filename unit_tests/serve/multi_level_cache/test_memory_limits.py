"""Available memory is the least of the machine's and of all control groups above the process."""

from pathlib import Path

import pytest

from serve.multi_level_cache.memory_limits import available_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:    1000000 kB\n")
    put(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_groups_the_machine_decides(root: Path):
    assert available_bytes(root) == 1000000 * 1024
    (root / "proc/self/cgroup").unlink()
    assert available_bytes(root) == 1000000 * 1024


def test_the_tightest_group_above_decides(root: Path):
    put(root / "sys/fs/cgroup/a/memory.max", "500000\n")
    put(root / "sys/fs/cgroup/a/memory.current", "300000\n")
    put(root / "sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 50000\n")
    put(root / "sys/fs/cgroup/a/b/memory.max", "max\n")
    put(root / "sys/fs/cgroup/a/b/memory.current", "300000\n")
    assert available_bytes(root) == 250000


def test_a_group_that_is_over_its_limit_leaves_nothing(root: Path):
    put(root / "sys/fs/cgroup/a/b/memory.max", "100")
    put(root / "sys/fs/cgroup/a/b/memory.current", "300")
    assert available_bytes(root) == 0


def test_groups_of_the_first_version_count_too(root: Path):
    put(root / "proc/self/cgroup", "5:cpu:/x\n4:memory:/c\n0::/\n")
    put(root / "sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9000")
    put(root / "sys/fs/cgroup/memory/c/memory.usage_in_bytes", "2000")
    assert available_bytes(root) == 7000


def test_this_machine_has_some():
    assert available_bytes() > 0
