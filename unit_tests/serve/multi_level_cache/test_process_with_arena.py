"""The real cache manager process over a real arena: stores, loads, and its own death."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, StateLayout
from serve.config import ResolvedConfig, ServeConfig
from serve.errors import LaunchError
from serve.ipc.channel import Inbox, Outbox
from serve.ipc.control import ControlClient
from serve.ipc.messages import (
    Acquire,
    AcquireReply,
    Begin,
    ChildReady,
    ChildStart,
    Claim,
    ClaimReply,
    EngineUp,
    JobAnswer,
    LeaseLost,
    Message,
    PageRange,
    Probe,
    ProbeReply,
    Resync,
    SlotsInUse,
)
from serve.ipc.pipe import MessagePipe
from serve.ipc.request_table import RequestTable, TableShape
from serve.launcher.arena import arena_fds, make_arena
from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from serve.multi_level_cache.object_format import ObjectFormat, object_formats
from serve.types import JobId, JobResult, SamplingParams

ROOT = Path(__file__).parents[3]
Reply = TypeVar("Reply", bound=Message)
NAMES = [bytes([page + 1]) * 32 for page in range(4)]
RANGE = [PageRange("full", 0, 4)]
LEAF = Leaf("kv", (0, 1), (2, 64), "float32", ShardKind.HEAD, 2)
FULL = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 16, (LEAF,))
LAYOUT = StateLayout(16, (FULL,))
STATE_LEAF = Leaf("state", (2, 3), (96, 64), "float32", ShardKind.HEAD, 2)
SEVERAL = StateLayout(
    16,
    (
        FULL,
        StateGroup("window", StateKind.BOUNDED, HitPolicy.TRAILING_PAGES, 16, (LEAF,), 20),
        StateGroup("state", StateKind.BOUNDED, HitPolicy.EXACT_CHECKPOINT, 16, (STATE_LEAF,)),
    ),
)


class Model:
    """As much of `ModelFacts` as the arena needs."""

    def __init__(self, layout: StateLayout = LAYOUT) -> None:
        self.layout = layout

    def describe(self, config: ResolvedConfig) -> dict[str, Any]:
        return {"layout": msgspec.to_builtins(self.layout)}


def config(run_dir: Path, cache_bytes: int = 4 << 20, disk: Path | None = None, **flags: Any) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="m", enable_cpu_cache=True, **flags),
        model_path=Path("m"),
        model_name="m",
        run_dir=run_dir,
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=2048,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=4,
        cpu_cache_bytes=cache_bytes,
        disk_cache_bytes=1 << 24 if disk is not None else 0,
        disk_cache_dir=disk,
    )


class Server:
    """Launcher, router and worker 0 around the process."""

    def __init__(self, run_dir: Path, disk: Path | None = None, layout: StateLayout = LAYOUT, **flags: Any) -> None:
        self.model = Model(layout)
        self.config = config(run_dir, disk=disk, **flags)
        self.run_dir = run_dir
        self.table = RequestTable.create(TableShape(4, 2048, 16))
        arena = make_arena(self.config, self.model)  # type: ignore[arg-type]
        assert arena is not None
        self.arena = arena
        self.router, self.worker = Inbox(run_dir, "router.1"), Inbox(run_dir, "pages-0.1")
        self.start()
        self.to_cache = Outbox(run_dir, "cache")

    def start(self) -> None:
        fds = {"table": self.table.fd, **arena_fds(self.arena)}
        self.pipe, theirs = MessagePipe.pair(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serve.ipc.child", "cache", "0", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *fds.values()],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        model = self.model.describe(self.config)
        self.pipe.send(ChildStart(1, self.config.model_dump_json().encode(), model, fds))
        assert self.pipe.receive() == [ChildReady("cache", 0, {})]
        self.pipe.send(EngineUp(1, {"namespace": "ab" * 32}))

    def control(self, method: str) -> Any:
        client = ControlClient(self.run_dir, "control-cache", timeout_s=60)
        try:
            return client.call(method)
        finally:
            client.close()

    def wait_until_backed(self) -> None:
        deadline = time.monotonic() + 60
        while self.control("status")["backed_slots"] < self.arena.shape.num_slots:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ask(self, message: Message, kind: type[Reply]) -> Reply:
        self.to_cache.send(message)
        reply = receive(self.router)
        assert isinstance(reply, kind)
        return reply

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for box in (self.to_cache, self.router, self.worker):
            box.close()


@pytest.fixture
def server(run_dir: Path) -> Iterator[Server]:
    running = Server(run_dir)
    yield running
    running.close()


def receive(inbox: Inbox) -> Message:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if messages := inbox.receive(0.5):
            (message,) = messages
            return message
    pytest.fail("nothing came")


def test_pages_are_stored_loaded_and_lost_with_the_manager(server: Server) -> None:
    server.wait_until_backed()
    prompt = np.zeros(70, np.uint32)
    generation = server.table.fill(2, prompt, SamplingParams(max_tokens=1), b"r" * 32, NAMES)
    store, load, running = JobId(1, 1), JobId(1, 2), JobId(1, 3)
    claimed = server.ask(Claim(store, 2, generation, RANGE, 1, 60.0), ClaimReply)
    assert len(claimed.granted) == 4
    assert server.arena.name[claimed.granted[1][2][0]].tobytes() == NAMES[1]
    server.to_cache.send(Begin(store))
    server.to_cache.send(JobAnswer(store, 0, JobResult.DONE))
    assert server.ask(Probe(1, 2, generation, 4), ProbeReply).host == {"full": b"\x0f"}
    granted = server.ask(Acquire(load, 2, generation, RANGE, 1, 60.0), AcquireReply)
    assert granted.slots == [[slots[0] for _, _, slots, _ in claimed.granted]]
    server.to_cache.send(Begin(load))
    server.to_cache.send(JobAnswer(load, 0, JobResult.DONE))
    assert server.control("check") == []
    assert server.control("status")["has_torch"] is False

    server.process.kill()
    server.process.wait()
    server.start()
    resync = receive(server.worker)
    assert isinstance(resync, Resync)
    used = granted.slots[0]
    claim = Claim(JobId(1, 4), 2, generation, RANGE, 1, 60.0)
    assert server.ask(claim, ClaimReply).num_refused == 4, "nothing before the workers have told"
    server.to_cache.send(SlotsInUse(resync.nonce, 0, [running], used))
    server.wait_until_backed()
    again = server.ask(claim, ClaimReply)
    assert not {slots[0] for _, _, slots, _ in again.granted} & set(used)
    assert server.ask(Begin(running), LeaseLost).job == running
    server.to_cache.send(JobAnswer(running, 0, JobResult.DONE))
    assert server.control("statistics")["slots"]["blocked"] == 0
    assert server.control("check") == []


def test_a_killed_manager_serves_from_disk_what_it_had_stored(run_dir: Path, tmp_path: Path) -> None:
    server = Server(run_dir, tmp_path / "cache")
    try:
        server.wait_until_backed()
        generation = server.table.fill(2, np.zeros(70, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES)
        claimed = server.ask(Claim(JobId(1, 1), 2, generation, RANGE, 1, 60.0), ClaimReply)
        (form,) = object_formats(LAYOUT)
        contents = []
        for _, page, slots, _ in claimed.granted:
            data = server.arena.payload[slots[0], : form.object_bytes]
            data[:] = np.random.default_rng(page).integers(0, 256, len(data), dtype=np.uint8)
            contents.append(data.copy())
            seeds = unit_seeds([NAMES[page]], form.group_index, form.unit_bytes)[0]
            server.arena.checksum[slots[0], : len(seeds)] = object_checksums(data, form.unit_bytes, seeds)
        server.to_cache.send(Begin(JobId(1, 1)))
        server.to_cache.send(JobAnswer(JobId(1, 1), 0, JobResult.DONE))
        deadline = time.monotonic() + 60
        while server.control("statistics")["objects"]["durability"] != {"durable": 4}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.process.kill()
        server.process.wait()
        server.arena.payload[:] = 0
        server.start()
        resync = receive(server.worker)
        assert isinstance(resync, Resync)
        server.to_cache.send(SlotsInUse(resync.nonce, 0, [], []))
        server.wait_until_backed()
        probed = server.ask(Probe(1, 2, generation, 4), ProbeReply)
        assert (probed.host, probed.disk) == ({"full": b"\0"}, {"full": b"\x0f"})
        granted = server.ask(Acquire(JobId(1, 2), 2, generation, RANGE, 1, 60.0), AcquireReply)
        assert granted.promoted == 4
        for slot, data in zip(granted.slots[0], contents, strict=True):
            assert (server.arena.payload[slot, : len(data)] == data).all()
        assert server.control("check") == []
    finally:
        server.close()


def test_the_configured_policy_decides_what_goes_to_disk(run_dir: Path, tmp_path: Path) -> None:
    flags = {"disk_cache_policy": "after_hits", "disk_cache_min_tokens": 70}
    server = Server(run_dir, tmp_path / "cache", **flags)
    (form,) = object_formats(LAYOUT)
    try:
        server.wait_until_backed()
        generation = server.table.fill(2, np.zeros(70, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES)
        claimed = server.ask(Claim(JobId(1, 1), 2, generation, RANGE, 1, 60.0, num_prompt=70), ClaimReply)
        for _, page, slots, _ in claimed.granted:
            write_object(server, form, page, slots)
        server.to_cache.send(Begin(JobId(1, 1)))
        server.to_cache.send(JobAnswer(JobId(1, 1), 0, JobResult.DONE))
        assert server.ask(Probe(1, 2, generation, 4), ProbeReply).host == {"full": b"\x0f"}
        assert server.control("statistics")["pages_withheld"] == {"no_hit": 4}
        short = server.table.fill(1, np.zeros(40, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES[:2])
        assert server.ask(Probe(2, 1, short, 2), ProbeReply).host == {"full": b"\x03"}
        again = server.table.fill(3, np.zeros(70, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES)
        server.ask(Acquire(JobId(1, 2), 3, again, [PageRange("full", 2, 1)], 1, 60.0), AcquireReply)
        deadline = time.monotonic() + 60
        # The short prompt has hit two pages that a prompt of 70 tokens stored; the long one has hit a third.
        while (found := server.control("statistics"))["objects"]["durability"] != {"durable": 3, "volatile": 1}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (found["pages_persisted"], found["pages_withheld"]) == (3, {"no_hit": 4})
    finally:
        server.close()


def test_objects_of_several_groups_are_stored_found_and_promoted_each_by_its_own_format(
    run_dir: Path, tmp_path: Path
) -> None:
    """Pages of all places, the last two of a window, and one state of several slots, by a job for each group."""
    server = Server(run_dir, tmp_path / "cache", SEVERAL)
    formats = {form.group: form for form in object_formats(SEVERAL)}
    wanted = {"full": range(4), "window": range(2, 4), "state": range(3, 4)}
    ranges = {group: PageRange(group, pages[0], len(pages)) for group, pages in wanted.items()}
    contents: dict[tuple[str, int], np.ndarray] = {}
    try:
        server.wait_until_backed()
        generation = server.table.fill(2, np.zeros(70, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES)
        for job, group in enumerate(wanted, 1):
            claimed = server.ask(Claim(JobId(1, job), 2, generation, [ranges[group]], 1, 60.0), ClaimReply)
            assert [page for _, page, _, _ in claimed.granted] == list(wanted[group])
            for _, page, slots, _ in claimed.granted:
                assert len(slots) == formats[group].num_slots(server.arena.shape.slot_bytes)
                contents[group, page] = write_object(server, formats[group], page, slots)
            server.to_cache.send(Begin(JobId(1, job)))
            server.to_cache.send(JobAnswer(JobId(1, job), 0, JobResult.DONE))
        deadline = time.monotonic() + 60
        while server.control("statistics")["objects"]["durability"] != {"durable": 7}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len({form.num_slots(server.arena.shape.slot_bytes) for form in formats.values()}) > 1
        found = {"full": b"\x0f", "window": b"\x0c", "state": b"\x08"}
        assert server.ask(Probe(1, 2, generation, 4), ProbeReply).host == found
        server.process.kill()
        server.process.wait()
        server.arena.payload[:] = 0
        server.start()
        resync = receive(server.worker)
        assert isinstance(resync, Resync)
        server.to_cache.send(SlotsInUse(resync.nonce, 0, [], []))
        server.wait_until_backed()
        probed = server.ask(Probe(1, 2, generation, 4), ProbeReply)
        assert (probed.host, probed.disk) == (dict.fromkeys(found, b"\0"), found)
        for job, group in enumerate(wanted, 11):
            granted = server.ask(Acquire(JobId(1, job), 2, generation, [ranges[group]], 1, 60.0), AcquireReply)
            assert granted.promoted == len(wanted[group])
            size = len(granted.slots[0]) // len(wanted[group])
            for number, page in enumerate(wanted[group]):
                slots = granted.slots[0][number * size : (number + 1) * size]
                data = np.concatenate([server.arena.payload[slot] for slot in slots])[: formats[group].object_bytes]
                assert (data == contents[group, page]).all()
        assert server.control("check") == []
    finally:
        server.close()


def write_object(server: Server, form: ObjectFormat, page: int, slots: Sequence[int]) -> np.ndarray:
    """Random bytes of an object, over its slots, with their checksums; returns them."""
    data = np.random.default_rng(page).integers(0, 256, form.object_bytes, dtype=np.uint8)
    size = server.arena.shape.slot_bytes
    for number, slot in enumerate(slots):
        part = data[number * size : (number + 1) * size]
        server.arena.payload[slot, : len(part)] = part
    seeds = unit_seeds([NAMES[page]], form.group_index, form.unit_bytes)[0]
    server.arena.checksum[slots[0], : len(seeds)] = object_checksums(data, form.unit_bytes, seeds)
    return data


def test_a_claim_lapses_without_a_message(server: Server) -> None:
    server.wait_until_backed()
    generation = server.table.fill(2, np.zeros(70, np.uint32), SamplingParams(max_tokens=1), b"r" * 32, NAMES)
    assert server.ask(Claim(JobId(1, 1), 2, generation, RANGE, 1, 0.2), ClaimReply).granted
    deadline = time.monotonic() + 60
    while server.control("statistics")["slots"]["filling"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_arena_too_small_for_the_model_stops_the_start(run_dir: Path) -> None:
    with pytest.raises(LaunchError, match="too small"):
        make_arena(config(run_dir, 1000), Model())  # type: ignore[arg-type]
    assert make_arena(config(run_dir, 0), Model()) is None  # type: ignore[arg-type]
