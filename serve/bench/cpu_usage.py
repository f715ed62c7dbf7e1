"""CPU seconds of a local server, by the role of its processes; the kernel counts them in ticks, mostly of 10 ms."""

from collections import defaultdict
from dataclasses import dataclass

import psutil

from serve.bench.flags import BenchError

CHILD_MODULE = "serve.ipc.child"


@dataclass(frozen=True)
class _ProcessTime:
    role: str
    seconds: float


class ServerCpu:
    """Reads the CPU clocks of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
            self._root.cpu_times()
        except psutil.Error as error:
            raise BenchError(f"--server_pid {pid}: no such process, or not ours to look at") from error
        self._before = self._read()

    def restart(self) -> None:
        """Count from now on."""
        self._before = self._read()

    def seconds(self) -> dict[str, float]:
        """User and system seconds by role since the last restart; what a process used before it ended is lost."""
        used: defaultdict[str, float] = defaultdict(float)
        for key, now in self._read().items():
            before = self._before.get(key)
            used[now.role] += now.seconds - (before.seconds if before else 0.0)
        return dict(used)

    def _read(self) -> dict[tuple[int, float], _ProcessTime]:
        """By (pid, creation time), for a pid may be used again."""
        times = {}
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return {}
        for process in processes:
            try:
                cpu = process.cpu_times()
                role = "main" if process == self._root else role_of(process.cmdline())
                times[process.pid, process.create_time()] = _ProcessTime(role, cpu.user + cpu.system)
            except psutil.Error:
                continue
        return times


def role_of(command_line: list[str]) -> str:
    """`router`, `worker` and so on of one of our children, else the name of the program; the root is `main`."""
    if CHILD_MODULE in command_line[:-1]:
        return command_line[command_line.index(CHILD_MODULE) + 1]
    return command_line[0].rpartition("/")[2] if command_line else "?"
