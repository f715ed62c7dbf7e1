"""The soak test for a short while."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "soak.py"


def test_a_minute_of_the_soak():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "60"], capture_output=True, text=True, timeout=280, check=False
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert " 0 wrong, 0 failed" in run.stdout
