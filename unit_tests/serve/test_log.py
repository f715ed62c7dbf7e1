import logging
import sys

import pytest

from serve import log

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_a_line_names_level_process_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("router-0", "info")
    logger = logging.getLogger("serve.router")
    logger.debug("hidden")
    logger.info("plain")
    with log.request_id("req-7"):
        logger.warning("inside")
    logger.error("after")
    captured = capsys.readouterr()
    lines = [line.split(" ", 1)[1] for line in captured.out.splitlines()]
    assert lines == [
        "INFO     router-0 plain",
        "WARNING  router-0 [req-7] inside",
        "ERROR    router-0 after",
    ]
    assert captured.err == ""


def test_uncaught_exceptions_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("cache-0", "info")
    error = ValueError("lost")
    sys.excepthook(ValueError, error, None)
    captured = capsys.readouterr()
    assert captured.out.count("ValueError: lost") == 1
    assert captured.err == ""
