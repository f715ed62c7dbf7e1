import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory whose path is short enough for sockets (pytest's own may not be)."""
    path = Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
