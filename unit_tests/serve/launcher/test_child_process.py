import os
import sys
from pathlib import Path

import pytest

from serve.errors import LaunchError
from serve.launcher.child_process import ChildProcess, ChildSpec


def test_a_child_that_the_system_cannot_start_is_one_line_and_leaves_no_descriptor(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(LaunchError, match=r"^worker-1 cannot be started: .*gone"):
        ChildProcess.spawn(ChildSpec("worker", 1, 1, "module"), b"{}", {})
    assert len(os.listdir("/proc/self/fd")) == len(before)
