"""Available memory is the least of the machine's and of all control groups above the process."""

from pathlib import Path

import pytest

from serve.multi_level_cache.memory_limits import available_bytes
from unit_tests.serve.helpers import write_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_file(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:    1000000 kB\n")
    write_file(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    return tmp_path


def test_without_groups_the_machine_decides(root: Path):
    assert available_bytes(root) == 1000000 * 1024
    (root / "proc/self/cgroup").unlink()
    assert available_bytes(root) == 1000000 * 1024


def test_the_tightest_group_above_decides(root: Path):
    write_file(root / "sys/fs/cgroup/a/memory.max", "500000\n")
    write_file(root / "sys/fs/cgroup/a/memory.current", "300000\n")
    write_file(root / "sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 50000\n")
    write_file(root / "sys/fs/cgroup/a/b/memory.max", "max\n")
    write_file(root / "sys/fs/cgroup/a/b/memory.current", "300000\n")
    assert available_bytes(root) == 250000


def test_a_group_that_is_over_its_limit_leaves_nothing(root: Path):
    write_file(root / "sys/fs/cgroup/a/b/memory.max", "100")
    write_file(root / "sys/fs/cgroup/a/b/memory.current", "300")
    assert available_bytes(root) == 0


def test_groups_of_the_first_version_count_too(root: Path):
    write_file(root / "proc/self/cgroup", "5:cpu:/x\n4:memory:/c\n0::/\n")
    write_file(root / "sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9000")
    write_file(root / "sys/fs/cgroup/memory/c/memory.usage_in_bytes", "2000")
    assert available_bytes(root) == 7000


def test_this_machine_has_some():
    assert available_bytes() > 0
