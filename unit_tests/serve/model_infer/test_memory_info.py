from pathlib import Path

import torch

from serve.model_infer.memory_info import available_memory, cgroup_headroom, resident_bytes

GIB = 1 << 30


def write_group(path: Path, limit: str, usage: int, inactive: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(limit + "\n")
    (path / "memory.current").write_text(f"{usage}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_the_tightest_parent_counts(tmp_path: Path):
    write_group(tmp_path / "a", str(4 * GIB), GIB)
    write_group(tmp_path / "a" / "b", str(16 * GIB), GIB)
    write_group(tmp_path / "a" / "b" / "c", "max", GIB)
    assert cgroup_headroom(tmp_path, "/a/b/c") == 3 * GIB
    assert cgroup_headroom(tmp_path, "/a") == 3 * GIB


def test_page_cache_that_can_go_is_free(tmp_path: Path):
    write_group(tmp_path / "a", str(4 * GIB), 3 * GIB, inactive=2 * GIB)
    assert cgroup_headroom(tmp_path, "/a") == 3 * GIB


def test_no_limit_is_none(tmp_path: Path):
    write_group(tmp_path / "a", "max", GIB)
    assert cgroup_headroom(tmp_path, "/a") is None
    assert cgroup_headroom(tmp_path, "/missing") is None


def test_version_one_is_understood(tmp_path: Path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(GIB))
    assert cgroup_headroom(tmp_path, "") == GIB
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert cgroup_headroom(tmp_path, "") is None


def test_this_machine_has_memory():
    assert 0 < available_memory(torch.device("cpu")) < 1 << 50
    assert resident_bytes() > 1 << 20
