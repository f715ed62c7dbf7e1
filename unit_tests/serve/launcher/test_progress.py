import logging

import pytest

from serve.launcher.progress import ProgressReporter


def test_without_a_terminal_a_phase_logs_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    reporter = ProgressReporter(on_terminal=False)
    with caplog.at_level(logging.INFO):
        for done in range(0, 1001):
            reporter.update("worker-0", "loading weights", done, 1000)
    assert caplog.messages == [f"loading weights: {percent}%" for percent in (25, 50, 75, 100)]


def test_ranks_are_summed(caplog: pytest.LogCaptureFixture) -> None:
    reporter = ProgressReporter(on_terminal=False)
    with caplog.at_level(logging.INFO):
        reporter.update("worker-0", "loading weights", 10, 10)
        reporter.update("worker-1", "loading weights", 0, 10)
        reporter.update("worker-1", "loading weights", 10, 10)
    assert caplog.messages[-1] == "loading weights: 100%"


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = ProgressReporter(on_terminal=True)
    reporter.update("worker-0", "loading weights", 512, 1024)
    reporter.close()
    assert "loading weights:  50%" in capsys.readouterr().err
