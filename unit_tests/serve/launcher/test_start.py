"""Starting: the handshake, and every way in which it fails."""

import os
import signal
import socket
import stat
from typing import Any

import pytest


def test_children_hear_that_the_engine_is_up(served: Any) -> None:
    ups = served.wait_event("EngineUp", count=4)
    assert {(up["role"], up["index"]) for up in ups} == {
        ("router", 0), ("httpserver", 0), ("httpserver", 1), ("cache", 0),
    }  # fmt: skip
    for up in ups:
        assert up["facts"]["epoch"] == 1
        info = up["facts"]["info"]
        assert info["num_pages"] == {"full": 99}
        assert info["namespace"] == "03" * 32
        assert len(bytes.fromhex(info["key"])) == 32
        assert info["page_size"] == 64
        assert info["groups"][0]["bytes_per_page"] == 64000
        assert info["max_req_total_len"] == 4096
        assert info["model"] == {"num_layers": 3}


def test_workers_share_the_threads(served: Any) -> None:
    assert {event["threads"] for event in served.events("start", "worker")} == {"3"}
    assert {event["threads"] for event in served.events("start", "router")} == {"1"}


def test_the_summary_is_printed_once(served: Any) -> None:
    out = served.out
    assert out.count("Varve serves fake at http://127.0.0.1:") == 1
    assert "full (full): 62.5 KiB a page of 64 tokens; device 99 pages, 6336 tokens, 6.0 MiB; host 0 pages" in out
    assert "worker-1: tokens 6400, weights 1.0 MiB, pool 3.0 MiB" in out
    assert "load weights 0.5 s" in out
    assert f"run directory {served.run_dir}" in out
    assert "loading weights: 100%" in out
    assert served.err == ""


def test_the_control_socket_tells_state_and_children(served: Any) -> None:
    children = served.control("children")
    assert sorted((child["role"], child["index"]) for child in children) == [
        ("cache", 0), ("httpserver", 0), ("httpserver", 1), ("router", 0), ("worker", 0), ("worker", 1),
    ]  # fmt: skip
    assert {child["pid"] for child in children} == {process.pid for process in served.descendants()}
    status = served.control("status")
    assert (status["state"], status["is_serving"], status["has_torch"]) == ("up", True, False)


def test_nothing_is_open_to_others(served: Any) -> None:
    assert stat.S_IMODE(served.run_dir.stat().st_mode) == 0o700
    assert not [name for name in os.listdir("/dev/shm") if "varve" in name or "vrv" in name]


def test_another_server_cannot_take_the_run_directory_or_the_port(start: Any, served: Any) -> None:
    port = served.control("status")["url"].rpartition(":")[2]
    for flags, line in (
        (("--run_dir", str(served.run_dir)), f"belongs to a running server (process {served.process.pid})"),
        (("--port", port), f"port {port} on 127.0.0.1 is in use; choose another one with --port"),
    ):
        other = start(*flags)
        assert other.wait_exit() in (1, 2)
        assert line in other.err
        assert other.err.count("\n") == 1
    assert served.control("status")["is_serving"]


@pytest.mark.parametrize(
    ("flags", "behaviours", "line", "code"),
    [
        (["--tp", "2"], {"worker_1": "fail"}, "worker-1: the weights do not fit into memory", 1),
        ([], {"router": "crash"}, "router-0 ended with exit code 3 before it was ready", 1),
        ([], {"httpserver": "crash"}, "httpserver-0 ended with exit code 3 before it was ready", 1),
        (["--start_timeout", "0.01"], {}, "not ready within 0.01 s: worker-0, router-0", 1),
        (
            ["--max_req_total_len", "5000"],
            {},
            "--max_req_total_len 5000 is above the model's context of 4096 tokens",
            2,
        ),
        (["--served_model_name", "missing"], {}, "model 'missing' is nowhere", 1),
    ],
)
def test_a_start_that_fails_is_one_line(
    start: Any, flags: list[str], behaviours: dict[str, str], line: str, code: int
) -> None:
    server = start(*flags, **behaviours)
    assert server.wait_exit() == code
    assert server.err == f"varve: error: {line}\n"
    assert "Traceback" not in server.out
    assert not server.run_dir.exists()
    assert server.descendants() == []


def test_a_port_in_use_by_anybody_is_one_line(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--port", str(port))
        assert server.wait_exit() == 1
    assert server.err == f"varve: error: port {port} on 127.0.0.1 is in use; choose another one with --port\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_cleanly(start: Any, number: signal.Signals) -> None:
    server = start(worker="hang")
    server.wait_event("start", "worker")
    server.process.send_signal(number)
    assert server.wait_exit() == 0
    assert server.err == ""
    assert not server.run_dir.exists()


def test_a_signal_while_the_model_is_fetched_ends_the_start(start: Any) -> None:
    server = start("--served_model_name", "slow")
    server.wait_output("fetching")
    server.process.send_signal(signal.SIGINT)
    assert server.wait_exit() == 0
    assert server.err == ""
