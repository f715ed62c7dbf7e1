"""What this machine has, without asking torch."""

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: its CPU affinity, lowered to the CPU quota of its cgroups; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota(cgroup_root, membership)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota(cgroup_root: Path, membership: Path) -> float | None:
    """The tightest CPU quota, in cores, of this process's cgroup and those above it; None without one."""
    quotas = [_quota_v2(directory) for directory in _cgroup_directories(cgroup_root, membership)]
    quotas.append(_quota_v1(cgroup_root / "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _cgroup_directories(cgroup_root: Path, membership: Path) -> list[Path]:
    """The process's cgroup v2 directory and its parents; in a container the root itself is the process's own."""
    lines = (_read(membership) or "").splitlines()
    path = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
    own = cgroup_root / path
    return [own, *(parent for parent in own.parents if parent.is_relative_to(cgroup_root))]


def _quota_v2(directory: Path) -> float | None:
    fields = (_read(directory / "cpu.max") or "max").split()
    if fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(directory: Path) -> float | None:
    quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
    if quota is None or period is None or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def detect_device(environment: Mapping[str, str], dev: Path = Path("/dev")) -> Literal["cpu", "cuda"]:
    """`cuda` when an NVIDIA device is visible and the installed torch can use one."""
    if environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    if torch_is_cpu_only():
        return "cpu"
    has_device = any(path.name[6:].isdigit() for path in dev.glob("nvidia*"))
    return "cuda" if has_device or (dev / "dxg").exists() else "cpu"


def torch_is_cpu_only() -> bool:
    """Whether the installed torch is a build without CUDA, told from its version; it is not imported."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True
