import logging
import sys
from collections.abc import Iterator

import pytest

from serve import log


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hook = root.handlers[:], root.level, sys.excepthook
    yield
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)


def test_a_line_names_level_process_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("router-0", "info")
    logger = logging.getLogger("serve.router")
    logger.debug("hidden")
    logger.info("plain")
    with log.request_id("req-7"):
        logger.warning("inside")
    logger.error("explicit", extra={"request_id": "req-8"})
    captured = capsys.readouterr()
    lines = [line.split(" ", 1)[1] for line in captured.out.splitlines()]
    assert lines == [
        "INFO     router-0 plain",
        "WARNING  router-0 [req-7] inside",
        "ERROR    router-0 [req-8] explicit",
    ]
    assert captured.err == ""


def test_uncaught_exceptions_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("cache-0", "info")
    error = ValueError("lost")
    sys.excepthook(ValueError, error, None)
    captured = capsys.readouterr()
    assert captured.out.count("ValueError: lost") == 1
    assert captured.err == ""
