from pathlib import Path

import pytest

from serve import machine
from unit_tests.serve.helpers import write_file


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "", None),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"cpu.max": "150000 100000"}, "0::/\n", 1.5),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 4.0),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, "1:x:/y\n0::/a/b\n", 2.0),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/x\n", 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/x\n", None),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, files: dict[str, str], membership: str, expected: float | None
) -> None:
    root, member = tmp_path / "cgroup", tmp_path / "membership"
    for name, text in files.items():
        write_file(root / name, text)
    member.write_text(membership)
    assert machine.cgroup_quota(root, member) == expected


def test_a_quota_below_one_core_still_leaves_one(tmp_path: Path) -> None:
    write_file(tmp_path / "cpu.max", "50000 100000")
    assert machine.usable_cores(tmp_path, tmp_path / "none") == 1


@pytest.mark.parametrize(
    ("devices", "environment", "torch", "expected"),
    [
        ([], {}, "2.11.0", "cpu"),
        (["nvidia0", "nvidiactl"], {}, "2.11.0+cu128", "cuda"),
        (["nvidiactl", "nvidia-uvm"], {}, "2.11.0", "cpu"),
        (["dxg"], {}, "2.11.0", "cuda"),
        (["nvidia3"], {"CUDA_VISIBLE_DEVICES": "0"}, "2.11.0", "cuda"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, "2.11.0", "cpu"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, "2.11.0", "cpu"),
        (["nvidia0"], {}, "2.11.0+cpu", "cpu"),
    ],
)
def test_a_visible_device_and_a_torch_that_can_use_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: list[str],
    environment: dict[str, str],
    torch: str,
    expected: str,
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(machine.metadata, "version", lambda name: torch)
    assert machine.detect_device(environment, tmp_path) == expected
