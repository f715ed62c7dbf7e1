"""How much memory a process may still use."""

from pathlib import Path

import psutil
import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device: on the CPU the least of what machine and control group allow."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = int(psutil.virtual_memory().available)
    group = cgroup_headroom(_CGROUP_ROOT, _own_cgroup())
    return machine if group is None else min(machine, group)


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int(psutil.Process().memory_info().rss)


def cgroup_headroom(root: Path, group: str) -> int | None:
    """Bytes until the tightest limit of `group` (path below `root`) and its parents; None without a limit.

    Page cache that the kernel can drop at once (inactive files) counts as free. Reads cgroup v2, then v1 names.
    """
    headrooms = []
    path = root / group.strip("/")
    for folder in (path, *path.parents, root / "memory"):
        if folder != root and root not in folder.parents:
            continue
        for limit_name, usage_name in (("memory.max", "memory.current"), _V1_NAMES):
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and usage is not None and limit < 1 << 60:
                headrooms.append(max(0, limit - usage + _inactive_file(folder)))
    return min(headrooms, default=None)


_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _own_cgroup() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        if line.startswith("0::"):
            return line[3:]
    return ""


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _inactive_file(folder: Path) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(number)
    except (OSError, ValueError):
        pass
    return 0
