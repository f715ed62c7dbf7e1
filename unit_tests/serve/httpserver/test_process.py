"""The real process, between a launcher's pipe and a router's mailbox."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.channel import Inbox, Outbox
from serve.ipc.control import ControlServer
from serve.ipc.messages import (
    AbortRequest,
    ChildFailed,
    ChildReady,
    ChildStart,
    EngineDown,
    EngineUp,
    Message,
    OutputBatch,
    RequestOutput,
    SlotReleased,
    StopChild,
    SubmitRequest,
)
from serve.ipc.pipe import MessagePipe
from serve.ipc.request_table import RequestTable, TableShape
from serve.types import FinishReason

ROOT = Path(__file__).resolve().parents[3]
BODY = {"model": "smol", "prompt": "Hi", "max_tokens": 4}


def make_config(run_dir: Path, model: Path, num_servers: int) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="smol", num_http_servers=num_servers, admin_api_key="boss"),
        model_path=model,
        model_name="smol",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=256,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=8,
    )


class Server:
    """HTTP processes of one server, with this test as their launcher."""

    def __init__(self, run_dir: Path, model: Path, num_servers: int = 1) -> None:
        self.table = RequestTable.create(TableShape(8, 256, 16))
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        config = make_config(run_dir, model, num_servers).model_dump_json().encode()
        self.children = [self._spawn(index, config) for index in range(num_servers)]

    def _spawn(self, index: int, config: bytes) -> tuple[MessagePipe, subprocess.Popen]:
        pipe, theirs = MessagePipe.pair(send_timeout_s=60)
        fds = {"table": self.table.fd, "listen": self.listening.fileno()}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "serve.ipc.child", "httpserver", str(index), str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *fds.values()],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        pipe.send(ChildStart(1, config, {"vocab_size": 49152, "eos_token_ids": [2]}, fds))
        return pipe, process

    def first_messages(self) -> list[Message]:
        found: list[Message] = []
        for pipe, _ in self.children:
            messages: list[Message] = []
            while not messages:
                messages = pipe.receive()
            found.extend(messages)
        return found

    def tell(self, message: Message) -> None:
        for pipe, _ in self.children:
            pipe.send(message)

    def stop(self) -> None:
        self.tell(StopChild(1))
        assert [process.wait(15) for _, process in self.children] == [0] * len(self.children)

    def close(self) -> None:
        for pipe, process in self.children:
            pipe.close()
            process.wait(10)
        self.listening.close()
        self.table.close()


class Router(threading.Thread):
    """Answers every request of an epoch with one token, on a thread of its own."""

    def __init__(self, run_dir: Path, table: RequestTable, epoch: int) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.table, self.epoch = run_dir, table, epoch
        self.servers: list[int] = []
        self.aborts = self.seen = 0
        self.silent = False
        self.ready, self.ends = threading.Event(), threading.Event()

    def run(self) -> None:
        inbox, ways = Inbox(self.run_dir, f"router.{self.epoch}"), {}
        self.ready.set()
        while not self.ends.is_set():
            for message in inbox.receive(0.05):
                self.aborts += isinstance(message, AbortRequest)
                self.seen += isinstance(message, SubmitRequest)
                if isinstance(message, SubmitRequest) and not self.silent:
                    way = ways.setdefault(message.server, Outbox(self.run_dir, f"http-{message.server}"))
                    self.answer(message, way)
        inbox.close()

    def answer(self, message: SubmitRequest, way: Outbox) -> None:
        self.servers.append(message.server)
        token = [19556]
        output = RequestOutput(message.slot, message.generation, token, FinishReason.LENGTH, [0, 0, 0])
        way.send(OutputBatch([output]))
        self.table.mark_released(message.slot, message.generation)
        way.send(SlotReleased([(message.slot, message.generation)]))

    @classmethod
    def start_new(cls, run_dir: Path, table: RequestTable, epoch: int) -> "Router":
        router = cls(run_dir, table, epoch)
        router.start()
        assert router.ready.wait(5)
        return router


def engine_up(epoch: int) -> EngineUp:
    return EngineUp(epoch, {"namespace": "ab" * 32, "key": "cd" * 32})


def ask_until_up(url: str, timeout_s: float = 10.0) -> httpx.Response:
    deadline = time.monotonic() + timeout_s
    while True:
        response = httpx.post(url + "/v1/completions", json=BODY, timeout=10)
        if response.status_code != 503 or time.monotonic() > deadline:
            return response
        time.sleep(0.05)


@pytest.fixture
def start(run_dir: Path, smollm_path: Path):
    servers: list[Server] = []

    def make(num_servers: int = 1) -> Server:
        servers.append(Server(run_dir, smollm_path, num_servers))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_it_serves_survives_an_engine_restart_and_stops(start, run_dir):
    server = start()
    assert server.first_messages() == [ChildReady("httpserver", 0, {})]
    first = Router.start_new(run_dir, server.table, 1)
    server.tell(engine_up(1))
    response = ask_until_up(server.url)
    assert response.json()["choices"][0] == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}

    server.tell(EngineDown(1, "a worker died"))
    first.ends.set()
    refused = httpx.post(server.url + "/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "a worker died" in refused.json()["error"]["message"]

    second = Router.start_new(run_dir, server.table, 2)
    server.tell(engine_up(2))
    assert ask_until_up(server.url).status_code == 200
    second.silent = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=BODY, timeout=0.3)
    deadline = time.monotonic() + 2
    while not second.aborts and time.monotonic() < deadline:
        time.sleep(0.01)
    assert second.aborts == 1
    second.ends.set()
    server.stop()


def test_a_stop_ends_running_requests_with_an_error_and_without_a_trace(start, run_dir, capfd):
    server = start()
    server.first_messages()
    router = Router.start_new(run_dir, server.table, 1)
    server.tell(engine_up(1))
    assert ask_until_up(server.url).status_code == 200
    router.silent = True
    host, port = server.listening.getsockname()
    half = socket.create_connection((host, port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: v\r\ncontent-length: 100\r\n\r\n{")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(httpx.post, server.url + "/v1/completions", json=BODY | {"stream": stream})
            for stream in (False, True)
        ]
        deadline = time.monotonic() + 5
        while router.seen < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        server.tell(StopChild(0))
        answers = [future.result(10) for future in asked]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert {answer.json()["error"]["message"] for answer in answers} == {"the server is stopping"}
    assert all(answer.headers["retry-after"] for answer in answers)
    assert half.recv(100) == b""
    half.close()
    assert [process.wait(5) for _, process in server.children] == [0]
    output = "".join(capfd.readouterr())
    assert "Traceback" not in output
    assert "ERROR" not in output
    router.ends.set()


def test_metrics_add_up_over_processes_and_include_the_router(start, run_dir):
    server = start(2)
    assert len(server.first_messages()) == 2
    router = Router.start_new(run_dir, server.table, 1)
    server.tell(engine_up(1))
    for _ in range(30):
        assert ask_until_up(server.url).status_code == 200
    statistics = {
        "num_steps": 7,
        "pages": {"full": {"free": 3}},
        "step_s": {"bounds": [1.0], "counts": [2, 1], "sum": 5.0},
    }
    control = ControlServer(
        run_dir, "control-router", {"statistics": lambda: statistics, "status": lambda: {"up": True}}
    )
    answering = threading.Event()

    def answer() -> None:
        while not answering.wait(0.02):
            control.run_pending()

    thread = threading.Thread(target=answer)
    thread.start()
    counted = 'varve_http_requests_total{method="POST",route="/v1/completions",status="200"} 30.0'
    text, deadline = "", time.monotonic() + 20
    while counted not in text and time.monotonic() < deadline:  # until both processes have left a snapshot
        text = httpx.get(server.url + "/metrics").text
    admin = httpx.get(server.url + "/admin/status", headers={"authorization": "Bearer boss"})
    refused = httpx.get(server.url + "/admin/list", headers={"authorization": "Bearer boss"})
    answering.set()
    thread.join()
    control.close()
    lines = text.splitlines()
    assert counted in lines
    assert "varve_http_generated_tokens_total 30.0" in lines
    assert "varve_engine_up 1.0" in lines
    assert "varve_router_steps_total 7.0" in lines
    assert 'varve_router_pages{group="full",state="free"} 3.0' in lines
    assert 'varve_router_step_seconds_bucket{le="+Inf"} 3.0' in lines
    assert admin.json() == {"result": {"router": {"up": True}}}
    assert refused.status_code == 502
    router.ends.set()
    server.stop()


def test_a_model_without_a_tokenizer_fails_the_start_with_one_line(run_dir):
    server = Server(run_dir, run_dir)
    (failed,) = server.first_messages()
    assert isinstance(failed, ChildFailed)
    assert "tokenizer.json" in failed.reason
    server.close()
