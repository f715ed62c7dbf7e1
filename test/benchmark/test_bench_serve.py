"""CI-sized runs of `varve bench serve` against a fake server whose delays and tokens are known."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from serve import cli
from unit_tests.serve.bench.fake_server import FakeServer, Script, plain, stream

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.yaml"))
FIRST, GAP = 0.04, 0.01


def bench(server: FakeServer, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a run."""
    out = tmp_path / "out.json"
    fixed = ["--base-url", server.base_url, "--json", str(out), "--progress", "false"]
    status = cli.main(["bench", "serve", *fixed, *flags])
    return status, json.loads(out.read_text()) if out.exists() else {}


class CachingServer:
    """Counts words (or token ids), and calls a prompt cached that has come before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, path: str, body: dict[str, Any]) -> Script:
        if path == "/v1/models":
            return plain("200 OK", b'{"data": [{"id": "fake"}]}')
        prompt = body["prompt"]
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        cached = length - 1 if str(prompt) in self.seen else 0
        self.seen.add(str(prompt))
        details = {"cached_tokens": cached, "cached_tokens_by_tier": {"device": cached}}
        usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
        return stream(body["max_tokens"], FIRST, GAP, usage)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_run_and_their_counts_are_exact(path: Path, tmp_path: Path) -> None:
    with FakeServer(CachingServer()) as server:
        status, data = bench(server, tmp_path, "--scenario", str(path), "--seed", "5")
    assert status == 0
    assert data["model"] == "fake"
    for figures in data["medians"].values():
        assert figures["failed"] == figures["short_answers"] == 0
        assert figures["completed"] == figures["requests"]
        assert figures["ttft_ms"]["min"] >= FIRST * 1e3
        assert figures["counted_by_server"]
    options = data["options"]
    assert len(data["requests"]) == (
        options["num_requests"]
        * (options["num_turns"] if options["workload"] == "multi_turn" else 1)
        * options["passes"]
        * options["repeat"]
    )


def test_known_delays_and_tokens_come_out(tmp_path: Path) -> None:
    flags = ("--num_requests", "4", "--input_len", "100", "--output_len", "6", "--repeat", "2")
    with FakeServer(CachingServer()) as server:
        status, data = bench(server, tmp_path, *flags, "--plot", str(tmp_path / "p.png"))
    figures = data["medians"]["pass 1"]
    assert status == 0
    assert (figures["input_tokens"], figures["output_tokens"], figures["cached_tokens"]) == (400, 24, 0)
    assert FIRST * 1e3 <= figures["ttft_ms"]["p50"] < FIRST * 1e3 + 250
    assert GAP * 1e3 <= figures["tpot_ms"]["p50"] < GAP * 1e3 + 100
    assert figures["e2e_ms"]["min"] >= (FIRST + 5 * GAP) * 1e3
    assert figures["output_tokens_per_s"] == pytest.approx(24 / figures["duration_s"], rel=0.5)
    assert len(server.requests) == 1 + 4 * 2
    assert len({str(body["prompt"]) for body in server.requests}) == 9
    assert (tmp_path / "p.png").exists()


def test_the_second_pass_sends_the_same_prompts(tmp_path: Path) -> None:
    with FakeServer(CachingServer()) as server:
        _, data = bench(server, tmp_path, "--preset", "S4", "--input_len", "50", "--output_len", "2")
    assert [data["medians"][f"pass {n}"]["cached_tokens"] for n in (1, 2)] == [0, 49]
    assert data["medians"]["pass 2"]["cached_tokens_by_tier"] == {"device": 49}


def test_failures_are_counted_by_kind_and_give_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = 0

    def respond(path: str, body: dict[str, Any]) -> Script:
        nonlocal calls
        calls += 1
        if calls in (3, 4):
            return plain("503 Busy", b'{"error": "queue full"}')
        script = stream(3, 0.0, 0.0, None)
        return script[:2] if calls == 5 else script

    with FakeServer(respond) as server:
        status, data = bench(
            server, tmp_path, "--model", "m", "--num_requests", "6", "--arrival", "closed_loop", "--concurrency", "1",
            "--output_len", "3",
        )  # fmt: skip
    assert status == 1
    assert data["medians"]["pass 1"]["failures"] == {"http_503": 2, "disconnected": 1}
    assert data["medians"]["pass 1"]["completed"] == 3
    printed = capsys.readouterr().out
    assert "failures: disconnected 1, http_503 2" in printed
    assert 'http_503: 503 {"error": "queue full"}' in printed


def test_steps_are_those_of_the_server_s_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, steps = CachingServer(), 40

    def respond(path: str, body: dict[str, Any]) -> Script:
        nonlocal steps
        if path == "/metrics":
            return plain("200 OK", f"# TYPE x counter\nvarve_router_steps_total {steps}.0\n".encode())
        steps += 5
        return answers(path, body)

    with FakeServer(respond) as server:
        _, data = bench(server, tmp_path, "--num_requests", "3", "--output_len", "2", "--server_pid", str(os.getpid()))
    assert data["medians"]["pass 1"]["server_steps"] == 15
    assert "main" in data["medians"]["pass 1"]["server_cpu_s"]
    assert "(15 steps, by the server's count)" in capsys.readouterr().out


def test_a_server_without_usage_is_counted_by_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda path, body: stream(3, 0.0, 0.0, None)) as server:
        status, data = bench(server, tmp_path, "--model", "m", "--output_len", "3", "--input_len", "20")
    figures = data["medians"]["pass 1"]
    assert (status, figures["input_tokens"], figures["output_tokens"], figures["cached_tokens"]) == (0, 20, 3, None)
    assert "the server sent no usage" in capsys.readouterr().out


def test_the_api_key_is_sent_and_not_written(tmp_path: Path) -> None:
    with FakeServer(CachingServer()) as server:
        _, data = bench(server, tmp_path, "--api_key", "hush", "--output_len", "2")
    assert all("Authorization: Bearer hush" in headers for headers in server.headers)
    assert "hush" not in json.dumps(data)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--preset", "S0"), "--preset S0: not one of"),
        (("--input_len", "x"), "--input_len x: should be"),
        (("--base_url", "nowhere"), "--base_url nowhere: should be"),
        (("--base_url", "http://127.0.0.1:1"), "no answer from http://127.0.0.1:1/v1/models"),
        (("--server_pid", "99999999"), "--server_pid 99999999: no such process"),
        (("--json", "/dev/null/x"), "--json /dev/null/x: Not a directory"),
        (("--plot", "/dev/null/x"), "--plot /dev/null/x: Not a directory"),
        (("--bas_url", "x"), "unknown flag --bas_url"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(
    flags: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(CachingServer()) as server:
        status, _ = bench(server, tmp_path, *flags)
    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.startswith(f"varve: error: {line}")
    assert printed.err.count("\n") == 1


def test_a_warm_up_that_fails_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda path, body: plain("404 Not Found", b"no such model")) as server:
        assert bench(server, tmp_path, "--model", "m")[0] == 2
    assert "the warm-up request failed: http_404: 404 no such model" in capsys.readouterr().err
