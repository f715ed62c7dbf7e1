import resource
import subprocess
import sys

PROGRAM = """
import resource
from serve.launcher.launch import raise_file_limit

raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int) -> tuple[int, int]:
    """The limits of a process that began with these and raised them."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    first, second = ran.stdout.split()
    return int(first), int(second)


def test_connections_may_use_all_descriptors_that_the_system_permits():
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert limits_after(256, hard) == (hard, hard)
    assert limits_after(hard, hard) == (hard, hard)
