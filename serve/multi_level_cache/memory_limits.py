"""How much memory this process tree may still take: of the machine, and of every control group above it."""

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """The least of MemAvailable and the rooms of the control groups. `root`: where /proc and /sys are found."""
    return min(_available_memory(root), *_group_rooms(root), _UNLIMITED)


def _available_memory(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _group_rooms(root: Path) -> Iterator[int]:
    """Room in each memory control group of this process and in those above it."""
    yield _UNLIMITED
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield _room(folder, *files)
            if folder == top:
                break


def _room(folder: Path, limit_file: str, usage_file: str) -> int:
    """Limit less usage, the reclaimable file cache not counted as usage."""
    limit = _read_number(folder / limit_file)
    usage = _read_number(folder / usage_file)
    if limit is None or usage is None:
        return _UNLIMITED
    return max(0, limit - usage + _inactive_file(folder / "memory.stat"))


def _read_number(path: Path) -> int | None:
    """The number in a file; None when there is no such file or it says 'max'."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "total_inactive_file"))
