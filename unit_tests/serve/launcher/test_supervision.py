"""Staying up: every process is killed, and children outlive no launcher. Tests share one server; order is free."""

from typing import Any

import psutil
import pytest

from unit_tests.serve.launcher.conftest import is_alive, wait_for


def engine_pids(server: Any) -> list[int]:
    return [child["pid"] for child in server.control("children") if child["role"] in ("worker", "router")]


@pytest.mark.parametrize(("role", "index"), [("worker", 1), ("router", 0)])
def test_an_engine_that_loses_a_member_restarts_under_the_next_epoch(served: Any, role: str, index: int) -> None:
    before = served.control("status")
    epoch, old = before["epoch"], engine_pids(served)
    assert len(old) == 3
    served.kill_child(role, index)
    downs = [served.wait_event("EngineDown", "httpserver", index=server, fact_epoch=epoch)[0] for server in (0, 1)]
    # All of the group are gone before anybody is told: from then on nobody can touch memory.
    assert not any(psutil.pid_exists(pid) for pid in old)
    assert all(f"{role}-{index} was killed by SIGKILL" in down["facts"]["reason"] for down in downs)
    served.wait_event("EngineDown", "cache", fact_epoch=epoch)
    for role_told in ("httpserver", "cache", "router"):
        served.wait_event("EngineUp", role_told, fact_epoch=epoch + 1)
    assert {event["restarts"] for event in served.events("start", "worker", epoch=epoch + 1)} == {epoch}
    status = served.control("status")
    assert (status["epoch"], status["state"], status["engine_restarts"]) == (epoch + 1, "up", epoch)


def test_an_http_process_comes_back_with_its_index_and_the_router_is_told(served: Any) -> None:
    before = served.control("status")["epoch"]
    pid = served.kill_child("httpserver", 1)
    (told,) = served.wait_event("ServerDown", "router", epoch=before)
    assert told["facts"] == {"server": 1}
    served.wait_event("EngineUp", "httpserver", index=1, restarts=1)
    again = served.child("httpserver", 1)
    assert again["pid"] != pid
    assert again["restarts"] == 1
    assert served.control("status")["epoch"] == before


def test_a_cache_manager_comes_back_learns_of_the_engine_and_the_router_is_told(served: Any) -> None:
    before = served.control("status")["epoch"]
    served.kill_child("cache")
    served.wait_event("CacheDown", "router", epoch=before)
    (up,) = served.wait_event("CacheUp", "router", epoch=before)
    assert up["facts"] == {"restarts": 1}
    served.wait_event("EngineUp", "cache", restarts=1, fact_epoch=before)
    assert served.child("cache")["restarts"] == 1
    assert served.control("status")["epoch"] == before


def test_what_keeps_dying_ends_the_server_with_one_line(start: Any) -> None:
    server = start(httpserver="die_after_restart").wait_ready()
    server.kill_child("httpserver")
    assert server.wait_exit(60) == 1
    assert server.err == ("varve: error: httpserver-0 keeps failing, giving up: httpserver-0 ended with exit code 9\n")
    assert len(server.events("start", "httpserver")) == 5
    assert not server.run_dir.exists()


def test_children_end_by_themselves_when_the_launcher_is_killed_and_the_next_one_cleans_up(start: Any) -> None:
    first = start(worker="spin")
    first.wait_event("start", "worker")
    first.wait_event("start", "router")
    children = first.descendants()
    assert len(children) == 4
    first.process.kill()
    first.process.wait()
    wait_for(lambda: not any(is_alive(child) for child in children), "children end")
    assert first.run_dir.exists()
    second = start("--run_dir", str(first.run_dir)).wait_ready()
    assert second.stop() == 0
    assert not first.run_dir.exists()
