import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.child import ParentPipe, StartError
from serve.ipc.messages import ChildFailed, ChildReady, ChildStart, EngineDown, EngineUp, Message, StopChild
from serve.ipc.pipe import FrameBuffer, MessagePipe, PipeClosedError
from serve.ipc.wire import MalformedFrameError

ROOT = Path(__file__).parents[3]
FAKES = Path(__file__).parents[1] / "fakes"


def make_config(run_dir: Path) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="none"),
        model_path=run_dir,
        model_name="none",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=64,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=4,
    )


class Child:
    """A child process of this test, and the launcher's end of its pipe."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self.pipe, theirs = MessagePipe.pair(send_timeout_s=5)
        with theirs:
            command = [sys.executable, "-P", "-m", "serve.ipc.child", "worker", str(index), str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{FAKES}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        config = make_config(run_dir).model_dump_json().encode()
        self.pipe.send(ChildStart(3, config, {"layers": 2}, {}, module="varve_fakes.echo_child"))

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while not messages:
            messages = self.pipe.receive()
        return messages


def test_a_child_gets_its_context_and_stops_when_told(run_dir: Path) -> None:
    child = Child(run_dir, 0)
    (ready,) = child.receive()
    assert isinstance(ready, ChildReady)
    assert ready.info == {
        "pid": child.process.pid,
        "epoch": 3,
        "model": {"layers": 2},
        "run_dir": str(run_dir),
        "ignores": [True, True],
        "blocked": [],
        "name": "varve-worker-0",
    }
    child.process.send_signal(signal.SIGINT)
    child.process.send_signal(signal.SIGTERM)
    child.pipe.send(StopChild(0))
    assert child.process.wait(10) == 0
    assert child.process.communicate() == ("", "")


def test_a_start_error_becomes_one_message_without_a_trace(run_dir: Path) -> None:
    child = Child(run_dir, 1)
    assert child.receive() == [ChildFailed("worker", 1, "the model has no weights")]
    assert child.process.wait(10) == 1
    assert child.process.communicate() == ("", "")


def test_an_unexpected_error_is_logged_once_with_its_trace(run_dir: Path) -> None:
    child = Child(run_dir, 2)
    assert child.process.wait(10) == 1
    out, err = child.process.communicate()
    assert out.count("ZeroDivisionError: boom") == 1
    assert "worker-2" in out
    assert err == ""
    with pytest.raises(PipeClosedError):
        child.receive()


def test_a_child_that_computes_ends_when_the_launcher_goes(run_dir: Path) -> None:
    child = Child(run_dir, 3)
    child.receive()
    child.pipe.close()
    assert child.process.wait(10) == 1
    child.process.communicate()


def parent_pipe() -> tuple[ParentPipe, socket.socket, threading.Event]:
    gone = threading.Event()
    ours, theirs = socket.socketpair()
    return ParentPipe(theirs.detach(), on_parent_gone=gone.set), ours, gone


def test_start_comes_first_and_the_rest_waits_for_receive() -> None:
    parent, ours, gone = parent_pipe()
    sender = MessagePipe(ours)
    start = ChildStart(1, b"{}", {}, {})
    sender.send(start)
    assert parent.receive_start(5) == start
    sender.send(EngineUp(1, {"namespace": "00"}))
    sender.send(EngineDown(1, "worker-0 was killed"))
    got: list[Message] = []
    deadline = time.monotonic() + 5
    while len(got) < 2 and time.monotonic() < deadline:
        got += parent.receive()
    assert got == [EngineUp(1, {"namespace": "00"}), EngineDown(1, "worker-0 was killed")]
    assert parent.receive() == []
    sender.close()
    assert gone.wait(5)


def test_a_first_message_that_is_no_start_is_refused() -> None:
    parent, ours, _ = parent_pipe()
    MessagePipe(ours).send(StopChild(0))
    with pytest.raises(StartError, match="got StopChild"):
        parent.receive_start(5)


def test_no_start_message_is_an_error_at_the_deadline() -> None:
    parent, _, _ = parent_pipe()
    with pytest.raises(StartError, match=r"within 0\.05 s"):
        parent.receive_start(0.05)


def test_a_damaged_line_counts_as_broken() -> None:
    _, ours, gone = parent_pipe()
    ours.sendall(b"\xff\xff\xff\xff")
    assert gone.wait(5)


def test_frames_cut_anywhere_come_out_whole() -> None:
    left, right = MessagePipe.pair(send_timeout_s=1)
    for number in range(3):
        left.send(StopChild(number))
    stream = right.recv(4096)
    buffer = FrameBuffer()
    messages = [message for byte in stream for message in buffer.feed(bytes([byte]))]
    assert messages == [StopChild(0), StopChild(1), StopChild(2)]


def test_a_frame_that_is_no_message_is_malformed() -> None:
    with pytest.raises(MalformedFrameError):
        FrameBuffer().feed(b"\x01\0\0\0\xc1")


def test_a_send_to_a_peer_that_does_not_read_gives_up() -> None:
    ours, theirs = MessagePipe.pair(send_timeout_s=0.1)
    with pytest.raises(PipeClosedError):
        ours.send(EngineDown(1, "x" * (8 << 20)))
    theirs.close()
