"""Stopping: in order, at once, and with nothing left."""

import os
import signal
from typing import Any

import pytest

from unit_tests.serve.launcher.conftest import is_alive


def test_a_stop_goes_through_the_roles_in_order_and_drains_http_first(start: Any) -> None:
    environment = {"VARVE_FAKE_CACHE": "1"}
    server = start("--tp", "2", "--num_http_servers", "2", environment=environment, httpserver="drain").wait_ready()
    children = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    order = [event["role"] for event in server.events("stop")]
    assert order == ["httpserver", "httpserver", "router", "worker", "worker", "cache"]
    assert [event["facts"] for event in server.events("StopChild", "httpserver")] == [{"drain_s": 5.0}] * 2
    assert server.events("StopChild", "router")[0]["time"] >= server.events("stop", "httpserver")[-1]["time"]
    assert not any(is_alive(process) for process in children)
    assert not server.run_dir.exists()
    assert server.err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_group_is_acted_on_by_the_launcher_only(start: Any, number: signal.Signals) -> None:
    server = start().wait_ready()
    os.killpg(server.process.pid, number)
    assert server.wait_exit() == 0
    assert [event["role"] for event in server.events("stop")] == ["httpserver", "router", "worker"]
    assert "Traceback" not in server.out + server.err


def test_a_second_signal_stops_at_once(start: Any) -> None:
    server = start("--drain_timeout", "60", httpserver="ignore_stop").wait_ready()
    children = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    server.wait_event("StopChild", "httpserver")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0  # sooner than the 60 s of the drain
    assert not any(is_alive(child) for child in children)
    assert not server.run_dir.exists()


def test_a_stop_during_a_restart_does_not_wait_for_who_does_not_listen_yet(start: Any) -> None:
    server = start(worker="hang_after_restart").wait_ready()
    server.kill_child("worker")
    server.wait_event("start", "worker", epoch=2)
    assert server.stop() == 0
    assert "is killed" not in server.out


def test_a_child_that_ignores_the_stop_is_killed(start: Any) -> None:
    server = start("--drain_timeout", "0", httpserver="ignore_stop").wait_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert "httpserver-0 does not stop and is killed" in server.out
    assert [event["role"] for event in server.events("stop")] == ["router", "worker"]
