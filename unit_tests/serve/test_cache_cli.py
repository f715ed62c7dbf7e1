"""`varve cache` from the command line: against a fake server over HTTP, a real cache manager, and a directory."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve import cli
from serve.ipc.control import ControlServer
from serve.ipc.messages import Begin, Claim, ClaimReply, JobAnswer
from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from serve.multi_level_cache.disk_directory import load_or_create_key
from serve.multi_level_cache.object_format import object_formats
from serve.types import JobId, JobResult, SamplingParams
from unit_tests.serve.multi_level_cache.test_disk_tier import Disk
from unit_tests.serve.multi_level_cache.test_process_with_arena import LAYOUT, NAMES, RANGE, Server

ROOT = Path(__file__).parents[2]
FLUSHED = {"device_pages": 1, "device_pages_in_use": 0, "host_objects": 2, "disk_objects": 3}


class FakeHttp:
    """Answers each path with (status, body), and keeps what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/cache/stats": (200, {"tiers": [], "router": {}, "cache": {}, "away": {"cache": "gone"}}),
            "/cache/ls?limit=20": (200, {"pages": []}),
            "/cache/ls?limit=3&cache_salt=a+b": (200, {"pages": []}),
            "/cache/check": (200, {"problems": {"router": ["odd"], "cache": []}}),
            "/flush_cache": (200, FLUSHED),
        }
        self.asked: list[tuple[str, str, str | None, bytes]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                fake.asked.append((self.command, self.path, self.headers.get("authorization"), body))
                status, answer = fake.answers.get(self.path, (404, {"detail": "Not Found"}))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def http() -> Iterator[FakeHttp]:
    fake = FakeHttp()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["cache", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_commands_go_to_the_admin_routes(http: FakeHttp, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--base_url", f"{http.url}/v1", "--admin-api-key", "k"]
    code, out, _ = run(capsys, "stats", *server)
    assert code == 0
    assert "cache is away: gone" in out
    assert run(capsys, "ls", *server, "--limit", 3, "--salt", "a b")[:2] == (0, "no pages\n")
    assert run(capsys, "check", *server)[:2] == (1, "router: odd\n")
    code, out, _ = run(capsys, "flush", *server, "--json")
    assert (code, json.loads(out)) == (0, FLUSHED)
    assert run(capsys, "flush", *server, "--salt", "s")[0] == 0
    assert http.asked == [
        ("GET", "/cache/stats", "Bearer k", b""),
        ("GET", "/cache/ls?limit=3&cache_salt=a+b", "Bearer k", b""),
        ("POST", "/cache/check", "Bearer k", b""),
        ("POST", "/flush_cache", "Bearer k", b"{}"),
        ("POST", "/flush_cache", "Bearer k", b'{"cache_salt":"s"}'),
    ]


def test_the_key_may_come_from_the_environment(
    http: FakeHttp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VARVE_ADMIN_API_KEY", "env")
    run(capsys, "stats", "--base_url", http.url)
    assert http.asked[0][2] == "Bearer env"


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ((401, {"error": {"message": "wrong key"}}), "/cache/stats answered 401: wrong key"),
        ((404, {"detail": "Not Found"}), "/cache/stats answered 404: Not Found"),
        ((200, b"<html>"), "/cache/stats answered 200, and no JSON: is it a Varve server?"),
        ((200, []), "/cache/stats answered 200: no reason"),
    ],
)
def test_refusals_are_one_line(
    http: FakeHttp, capsys: pytest.CaptureFixture[str], answer: tuple[int, Any], line: str
) -> None:
    http.answers["/cache/stats"] = answer
    assert run(capsys, "stats", "--base_url", http.url) == (1, "", f"varve: error: {http.url}{line}\n")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ([], 2, "the following arguments are required: command"),
        (["stat"], 2, "argument command: invalid choice: 'stat'"),
        (["stats", "--fix"], 2, "unknown flag --fix"),
        (["ls", "--limit", "many"], 2, "argument --limit: invalid int value: 'many'"),
        (["ls", "--limit", "-1"], 2, "--limit -1: should be between 0 and 1000"),
        (["check", "--fix"], 2, "--fix needs --disk_cache_dir"),
        (["check", "--disk_cache_dir", "/x", "--run_dir", "/y"], 2, "--disk_cache_dir is checked without a server"),
        (["check", "--disk_cache_dir", "/no/such"], 1, "/no/such is no disk cache: it has no index.sqlite"),
        (["stats", "--run_dir", "/no/such"], 2, "--run_dir /no/such: no server runs there"),
        (["stats", "--run_dir", "/x", "--base_url", "http://y"], 2, "--run_dir needs neither"),
        (["stats", "--base_url", "nonsense"], 2, "--base_url nonsense: "),
        (["flush", "--base_url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1 does not answer: "),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], code: int, line: str) -> None:
    given, out, err = run(capsys, *words)
    assert (given, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(f"varve: error: {line}")


@pytest.mark.parametrize("command", ["stats", "ls", "check", "flush"])
def test_help_explains(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["cache", command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--base_url" in text
    assert "Exit codes" in text


def test_a_directory_is_checked_and_put_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_or_create_key(tmp_path)
    disk = Disk(tmp_path)
    disk.store("a", "b")
    disk.tier.close(10)
    check = ("check", "--disk_cache_dir", tmp_path)
    assert run(capsys, *check)[:2] == (0, "no problems\n2 objects in 1 segments, 8.0 KiB read\n")
    (tmp_path / "segment-00000009").touch()
    stray = "segment-00000009 is in no row of the index\n2 objects"
    code, out, _ = run(capsys, *check)
    assert code == 1
    assert out.startswith(stray)
    code, out, _ = run(capsys, *check, "--fix")
    assert code == 0
    assert out.startswith(f"fixed: {stray}")
    code, out, _ = run(capsys, *check, "--json")
    assert (code, json.loads(out)["problems"], json.loads(out)["num_objects"]) == (0, [], 2)


class FakeRouter:
    """The router's control socket, whatever is flushed being counted."""

    def __init__(self, run_dir: Path) -> None:
        self.calls: list[str] = []
        self._ends = threading.Event()

        def told(name: str, answer: Any) -> Any:
            return lambda **arguments: self.calls.append(name) or answer

        answers = {
            "flush": {"num_dropped": 7, "num_referenced": 0},
            "open_tiers": {},
            "root": (b"r" * 32).hex(),
            "check": {"problems": []},
            "statistics": {"tiers": {"num_hits_host": 3}, "cached_tokens": {"host": 48}},
        }
        self._control = ControlServer(run_dir, "control-router", {n: told(n, a) for n, a in answers.items()})
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._ends.wait(0.01):
            self._control.run_pending()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._control.close()


def test_a_real_cache_manager_is_operated_through_its_run_directory(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "cache"
    load_or_create_key(directory)
    server, router = Server(run_dir, directory), FakeRouter(run_dir)
    try:
        server.wait_until_backed()
        store_four_pages(server)
        found = json.loads(run(capsys, "stats", "--run_dir", run_dir, "--json")[1])
        assert [(tier["tier"], tier["hit_tokens"]) for tier in found["tiers"]] == [
            ("device", 0),
            ("host", 48),
            ("disk", 0),
        ]
        assert (found["tiers"][1]["pages"]["durable"], found["tiers"][2]["pages"]["stored"]) == (4, 4)
        pages = json.loads(run(capsys, "ls", "--run_dir", run_dir, "--salt", "x", "--json")[1])
        assert {page["name"] for page in pages} == {name.hex() for name in NAMES}
        assert run(capsys, "check", "--run_dir", run_dir)[:2] == (0, "no problems\n")
        code, _, err = run(capsys, "check", "--disk_cache_dir", directory)
        assert (code, err) == (1, f"varve: error: disk cache {directory} is used by another server\n")
        words = [sys.executable, "-m", "serve.cli", "cache", "flush", "--run_dir", str(run_dir), "--salt", "x"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "flushed: 7 pages of the device, 4 objects of the host, 4 of the disk\n"
        assert router.calls[-3:] == ["root", "flush", "open_tiers"]
        assert run(capsys, "ls", "--run_dir", run_dir)[:2] == (0, "no pages\n")
    finally:
        router.close()
        server.close()
    # The manager was killed right after the flush had answered: no row may bring a page back.
    code, out, _ = run(capsys, "check", "--disk_cache_dir", directory)
    assert (code, out) == (0, "no problems\n0 objects in 1 segments, 0 B read\n")


def store_four_pages(server: Server) -> None:
    """As a worker would, and on until they are on disk."""
    job = JobId(1, 1)
    generation = server.table.fill(2, np.zeros(70, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES)
    claimed = server.ask(Claim(job, 2, generation, RANGE, 1, 60.0), ClaimReply)
    (form,) = object_formats(LAYOUT)
    for _, page, slots, _ in claimed.granted:
        data = server.arena.payload[slots[0], : form.object_bytes]
        data[:] = page
        seeds = unit_seeds([NAMES[page]], form.group_index, form.unit_bytes)[0]
        server.arena.checksum[slots[0], : len(seeds)] = object_checksums(data, form.unit_bytes, seeds)
    server.to_cache.send(Begin(job))
    server.to_cache.send(JobAnswer(job, 0, JobResult.DONE))
    deadline = time.monotonic() + 60
    while server.control("statistics")["objects"]["durability"] != {"durable": 4}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
