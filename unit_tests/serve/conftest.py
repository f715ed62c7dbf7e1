import logging
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory whose path is short enough for sockets (pytest's own may not be)."""
    path = Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Undoes what `log.set_up` sets for the whole process."""
    root, packages = logging.getLogger(), [logging.getLogger(name) for name in ("serve", "models", "kernels")]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *packages)]
    hooks = sys.excepthook, threading.excepthook
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, *packages), levels, strict=True):
        logger.setLevel(level)
    sys.excepthook, threading.excepthook = hooks
