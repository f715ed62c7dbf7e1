import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CYCLES = """
import gc
from serve.ipc.process_control import freeze_start_up

class Request:
    living = 0

    def __init__(self):
        self.me, self.parts = self, [[] for _ in range(20)]
        Request.living += 1

    def __del__(self):
        Request.living -= 1

kept = [[] for _ in range(300_000)]  # what start-up makes
{freeze}
most, running = 0, []
for _ in range(30_000):
    running.append(Request())
    if len(running) > 32:
        del running[0]
    most = max(most, Request.living)
print(most, gc.get_freeze_count())
"""


def run(freeze: str) -> tuple[int, int]:
    code = CYCLES.replace("{freeze}", freeze)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    most, frozen = done.stdout.split()
    return int(most), int(frozen)


def test_cycles_of_requests_are_freed_after_hundreds_and_not_after_thousands():
    """Those that were in flight when the middle generation was collected wait for a full collection."""
    before, _ = run("")
    after, frozen = run("freeze_start_up()")
    assert before > 1500
    assert after < 750
    assert frozen > 300_000
