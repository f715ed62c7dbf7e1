import os
import subprocess
import sys

import pytest

from serve.bench.cpu_usage import ServerCpu, role_of
from serve.bench.flags import BenchError


def test_roles_are_read_from_command_lines() -> None:
    assert role_of(["python", "-m", "serve.ipc.child", "router", "0", "5"]) == "router"
    assert role_of(["/usr/bin/llama-server", "-m", "x"]) == "llama-server"
    assert role_of(["python", "serve.ipc.child"]) == "python"
    assert role_of([]) == "?"


def test_seconds_count_the_process_and_its_children_from_the_restart() -> None:
    spin = "import time\nprint(flush=True)\nwhile time.process_time() < 60: pass"
    cpu = ServerCpu(os.getpid())
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            while cpu.seconds().get(os.path.basename(sys.executable), 0.0) < 0.1:
                pass
            assert cpu.seconds()["main"] > 0
            cpu.restart()
            assert cpu.seconds()[os.path.basename(sys.executable)] < 0.1
        finally:
            child.kill()


def test_a_pid_that_is_not_there_is_one_line() -> None:
    with pytest.raises(BenchError, match="--server_pid"):
        ServerCpu(2**22 + 5)
