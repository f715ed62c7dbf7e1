"""Checks of a model's cache in a real server: hits on device, in host memory and on disk give the text of a miss."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.errors import UserError
from serve.ipc.control import ControlClient, ControlError

NUM_TOKENS = 16
NEAR_TIE = 0.25
"""Difference of log-probabilities below which rounding of bfloat16 may exchange two tokens."""
_START_S, _STOP_S, _QUIET_S, _ANSWER_S = 600.0, 60.0, 60.0, 600.0
_ATTEMPTS = 3
_NAME = "validated"
_TIERS = ("device", "host", "disk")


class ValidateError(UserError):
    """The server of the checks does not start, or does not answer."""


@dataclass(frozen=True)
class Text:
    """An answer: tokens, by how much the best was more likely than the second at each, and cached tokens by tier."""

    tokens: list[int]
    leads: list[float]
    cached: dict[str, int]


@dataclass(frozen=True)
class TierCheck:
    """One tier over all prompts. wanted, cached: tokens that it should have given, and gave."""

    tier: str
    num_prompts: int
    wanted: int
    cached: int
    num_other_texts: int

    @property
    def is_right(self) -> bool:
        return self.cached == self.wanted and not self.num_other_texts


@dataclass(frozen=True)
class TierPlan:
    """model: as on the command line. vocab_size: prompts are random ids below. gib: of host and of disk tier."""

    model: str
    data_type: str
    device: str
    page_size: int
    vocab_size: int
    lengths: list[int]
    gib: float
    load_format: str = "auto"


def check_tiers(plan: TierPlan, directory: Path) -> list[TierCheck]:
    """Start a server twice in `directory`: it stores and hits, and after its restart hits what lies on disk."""
    generator = random.Random(0)
    prompts = [[generator.randrange(plan.vocab_size) for _ in range(length)] for length in plan.lengths]
    with _server(plan, directory) as server:
        misses = [server.ask(prompt) for prompt in prompts]
        checks = [_compared("none", plan, misses, misses)]
        checks.append(_compared("device", plan, misses, [server.ask(prompt) for prompt in prompts]))
        checks.append(_compared("host", plan, misses, server.hits(prompts, plan.page_size)))
        server.settle()
    with _server(plan, directory) as server:
        checks.append(_compared("disk", plan, misses, server.hits(prompts, plan.page_size)))
    return checks


def usable(length: int, page_size: int) -> int:
    """Tokens of a prompt that a full hit does not compute: the last one always is."""
    return (length - 1) // page_size * page_size


def _compared(tier: str, plan: TierPlan, misses: list[Text], texts: list[Text]) -> TierCheck:
    wanted = 0 if tier == "none" else sum(usable(length, plan.page_size) for length in plan.lengths)
    cached = sum(sum(text.cached.values()) if tier == "none" else _of_tier(text, tier) for text in texts)
    pairs = zip(misses, texts, strict=True)
    others = sum(not is_same_text(miss, text, plan.data_type) for miss, text in pairs)
    return TierCheck(tier, len(texts), wanted, cached, others)


def _of_tier(text: Text, tier: str) -> int:
    """After a restart, what came from disk the first time may come from the host the second time."""
    return text.cached["disk"] + text.cached["host"] if tier == "disk" else text.cached[tier]


def is_same_text(one: Text, other: Text, data_type: str) -> bool:
    """Equal tokens; in bfloat16 they may part where the two best are nearly as likely."""
    for first, second, lead in zip(one.tokens, other.tokens, one.leads, strict=True):
        if first != second:
            return data_type != "float32" and lead < NEAR_TIE
    return True


class CheckedServer:
    """A running server, asked over loopback and through its control sockets."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self._url = url
        self._run_dir = run_dir

    def ask(self, prompt: list[int]) -> Text:
        """One greedy answer. Raises ValidateError."""
        import httpx

        body = {"model": _NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 2}
        try:
            response = httpx.post(f"{self._url}/v1/completions", json=body, timeout=_ANSWER_S)
        except httpx.HTTPError as error:
            raise ValidateError(f"the server does not answer: {error}") from error
        if response.status_code != 200:
            raise ValidateError(f"the server answered {response.status_code}: {response.text}")
        return _text(response.json())

    def hits(self, prompts: list[list[int]], page_size: int) -> list[Text]:
        """Answers after a flush of the device: of each prompt the one with the greatest hit in a few attempts, since a
        busy machine may make one load late."""
        best: dict[int, Text] = {}
        for _ in range(_ATTEMPTS):
            self.flush_device()
            for index, prompt in enumerate(prompts):
                if index in best and sum(best[index].cached.values()) >= usable(len(prompt), page_size):
                    continue
                text = self.ask(prompt)
                if index not in best or sum(text.cached.values()) > sum(best[index].cached.values()):
                    best[index] = text
        return [best[index] for index in range(len(prompts))]

    def flush_device(self) -> None:
        """Every page leaves the device, once the tiers below have what they want."""
        self.settle()
        self._call("router", "flush")

    def settle(self) -> None:
        """Wait until no request, job or write to disk is under way. Raises ValidateError."""
        end = time.monotonic() + _QUIET_S
        while time.monotonic() < end:
            router, cache = self._call("router", "statistics"), self._call("cache", "statistics")
            writing = cache["objects"]["durability"].get("persisting", 0)
            if not (router["num_requests"] or router["jobs_in_flight"] or cache["leases"] or writing):
                return
            time.sleep(0.05)
        raise ValidateError(f"the server has not come to rest within {_QUIET_S:.0f} s")

    def _call(self, part: str, method: str) -> dict[str, Any]:
        client = ControlClient(self._run_dir, f"control-{part}")
        try:
            return dict(client.call(method))
        except ControlError as error:
            raise ValidateError(f"{part} does not answer: {error}") from error
        finally:
            client.close()


def _text(body: dict[str, Any]) -> Text:
    choice = body["choices"][0]
    details = body["usage"]["prompt_tokens_details"]
    leads = [_lead(list(each.values())) for each in choice["logprobs"]["top_logprobs"]]
    return Text(choice["token_ids"], leads, {tier: details["cached_tokens_by_tier"][tier] for tier in _TIERS})


def _lead(logprobs: list[float]) -> float:
    """Two tokens with the same text share an entry: then nobody knows."""
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


@contextlib.contextmanager
def _server(plan: TierPlan, directory: Path) -> Iterator[CheckedServer]:
    """`varve serve` with all tiers; stopped when left. Raises ValidateError with the end of its log."""
    import httpx

    run_dir, log_path, port = directory / "run", directory / "log", _free_port()
    longest = max(plan.lengths) + NUM_TOKENS
    flags = {
        "port": port,
        "run_dir": run_dir,
        "served_model_name": _NAME,
        "data_type": plan.data_type,
        "device": plan.device,
        "load_format": plan.load_format,
        "cpu_cache_token_page_size": plan.page_size,
        "max_req_total_len": longest,
        "running_max_req_size": 4,
        "max_total_token_num": (len(plan.lengths) + 2) * (longest + 2 * plan.page_size),
        "cpu_cache_load_policy": "always",
        "cpu_cache_storage_size": plan.gib,
        "disk_cache_storage_size": plan.gib + 1.0,
        "disk_cache_dir": directory / "pages",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "serve.cli", "serve", plan.model, "--enable_cpu_cache", "--enable_disk_cache"]
    with log_path.open("wb") as log:
        process = subprocess.Popen([*command, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/readiness", timeout=2.0).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise ValidateError(f"the server did not start: {_last_line(log_path)}")
            time.sleep(0.1)
        yield CheckedServer(url, run_dir)
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it says nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
