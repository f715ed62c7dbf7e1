import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from serve.ipc.channel import ChannelFullError, ChannelThreadError, Inbox, Outbox
from serve.ipc.messages import AbortRequest, JoinRow, Message, SlotReleased, StepPlan, SubmitRequest
from serve.ipc.run_paths import SocketPathError
from serve.ipc.wakeup import Wakeup


@pytest.fixture
def inbox(run_dir: Path) -> Iterator[Inbox]:
    box = Inbox(run_dir, "router.1")
    yield box
    box.close()


@pytest.fixture
def outbox(run_dir: Path) -> Iterator[Outbox]:
    box = Outbox(run_dir, "router.1")
    yield box
    box.close()


def receive_count(inbox: Inbox, count: int) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + 5
    while len(messages) < count and time.monotonic() < deadline:
        messages += inbox.receive(0.5)
    return messages


def test_messages_arrive_in_order_as_their_own_types(inbox: Inbox, outbox: Outbox) -> None:
    sent: list[Message] = [
        SubmitRequest(1, 2, 0, "req-1", 5),
        StepPlan(1, 7, leaves=[3], joins=[JoinRow(0, 1, 2, 10, 10, 0, {"full": [1, 2]})], chunks=[(0, 10)]),
        SlotReleased([(1, 2)]),
    ]
    for message in sent:
        outbox.send(message)
    assert receive_count(inbox, 3) == sent


def test_a_sender_may_come_before_the_mailbox(run_dir: Path) -> None:
    outbox = Outbox(run_dir, "http-0")
    outbox.send(AbortRequest(1, 1))
    inbox = Inbox(run_dir, "http-0")
    assert receive_count(inbox, 1) == [AbortRequest(1, 1)]
    inbox.close()
    outbox.close()


def test_a_new_mailbox_takes_over_a_stale_socket_file(run_dir: Path) -> None:
    (run_dir / "cache.sock").write_text("left by a process that was killed")
    inbox, outbox = Inbox(run_dir, "cache"), Outbox(run_dir, "cache")
    outbox.send(AbortRequest(2, 2))
    assert receive_count(inbox, 1) == [AbortRequest(2, 2)]
    inbox.close()
    outbox.close()


def test_a_sender_finds_a_restarted_mailbox(run_dir: Path) -> None:
    outbox = Outbox(run_dir, "http-1")
    for restart in range(3):
        inbox = Inbox(run_dir, "http-1")
        deadline = time.monotonic() + 5
        messages: list[Message] = []
        while not messages and time.monotonic() < deadline:
            outbox.send(AbortRequest(restart, 0))
            messages = inbox.receive(0.05)
        assert AbortRequest(restart, 0) in messages + inbox.receive(0.2)
        inbox.close()
    outbox.close()


def test_receive_waits_as_long_as_told(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    assert inbox.receive(0.1) == []
    assert time.monotonic() - started > 0.09
    monkeypatch.setattr(inbox, "_poller", None)  # nothing to wait with
    assert inbox.receive(0) == []


def test_a_wakeup_ends_the_wait(inbox: Inbox) -> None:
    wakeup = Wakeup()
    inbox.add_wakeup(wakeup.fileno())
    threading.Timer(0.1, wakeup.set).start()
    assert inbox.receive(None) == []


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"garbage", b"\x92\xa7Unknown\x01", b"\x91\xadSubmitRequest"])
def test_a_malformed_frame_is_counted_and_dropped(
    inbox: Inbox, run_dir: Path, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    raw = zmq.Context.instance().socket(zmq.PUSH)
    raw.connect(f"ipc://{run_dir}/router.1.sock")
    raw.send(frame)
    outbox = Outbox(run_dir, "router.1")
    outbox.send(AbortRequest(1, 1))
    assert receive_count(inbox, 1) == [AbortRequest(1, 1)]
    deadline = time.monotonic() + 5
    while not inbox.num_malformed and time.monotonic() < deadline:
        inbox.receive(0.05)
    assert inbox.num_malformed == 1
    assert "malformed" in caplog.text
    raw.close(linger=0)
    outbox.close()


def test_another_thread_may_not_use_a_mailbox(inbox: Inbox, outbox: Outbox) -> None:
    errors: list[ChannelThreadError] = []

    def misuse() -> None:
        for use in (lambda: inbox.receive(0), lambda: outbox.send(AbortRequest(1, 1))):
            try:
                use()
            except ChannelThreadError as error:
                errors.append(error)

    thread = threading.Thread(target=misuse)
    thread.start()
    thread.join()
    assert len(errors) == 2


def test_a_full_queue_raises_and_does_not_block(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.ipc.channel.MAX_QUEUED_MESSAGES", 10)
    outbox = Outbox(run_dir, "nobody")
    for _ in range(10):
        outbox.send(AbortRequest(1, 1))
    with pytest.raises(ChannelFullError, match="nobody"):
        outbox.send(AbortRequest(1, 1))
    outbox.close()


def test_a_path_too_long_for_a_socket_is_an_error(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(SocketPathError, match="limit is 107"):
        Inbox(deep, "router.1")
    with pytest.raises(SocketPathError):
        Outbox(deep, "router.1")


def test_async_receive_gets_every_message_of_many_bursts(inbox: Inbox, run_dir: Path) -> None:
    bursts, burst = 200, 7

    def send_all() -> None:
        outbox = Outbox(run_dir, "router.1")
        for number in range(bursts * burst):
            outbox.send(AbortRequest(number, 0))
            if number % burst == 0:
                time.sleep(0.0005)
        done.wait(10)
        outbox.close()

    async def collect() -> list[Message]:
        messages: list[Message] = []
        while len(messages) < bursts * burst:
            messages += await asyncio.wait_for(inbox.receive_async(), timeout=5)
        return messages

    done = threading.Event()
    sender = threading.Thread(target=send_all)
    sender.start()
    messages = asyncio.run(collect())
    done.set()
    sender.join()
    assert messages == [AbortRequest(number, 0) for number in range(bursts * burst)]


def test_async_receive_can_be_cancelled_and_used_again(inbox: Inbox, outbox: Outbox) -> None:
    async def run() -> list[Message]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.receive_async(), timeout=0.05)
        outbox.send(AbortRequest(9, 9))
        return await asyncio.wait_for(inbox.receive_async(), timeout=5)

    assert asyncio.run(run()) == [AbortRequest(9, 9)]
