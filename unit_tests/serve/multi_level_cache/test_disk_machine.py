"""Random histories of the product's own disk tier over real files, against a model of what must and may be there."""

import contextlib
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve.multi_level_cache.disk_check import check_directory
from serve.multi_level_cache.disk_directory import load_or_create_key
from serve.multi_level_cache.disk_io import aligned
from serve.multi_level_cache.disk_room import DiskOptions
from serve.multi_level_cache.disk_tier import DiskTier
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import LoadRequest, StoreRequest, TransferOutcome, TransferResult
from unit_tests.serve.multi_level_cache.builders import FORMATS, page_name
from unit_tests.serve.multi_level_cache.kill_bench import BY_GROUP, checksums, content

NUM_NAMES, NUM_ROOTS = 40, 3
SLOTS = 24
QUOTAS = (SLOTS * 4096, 2 * SLOTS * 4096, SLOTS * 2048)
NAMESPACES = (b"a" * 32, b"b" * 32)
DEADLINE_S = 10.0

names = st.lists(st.integers(0, NUM_NAMES - 1), min_size=1, max_size=12, unique=True)
forms = st.sampled_from([FORMATS[0], FORMATS[0], FORMATS[1]])


def root_of(name: int) -> bytes:
    return bytes([name % NUM_ROOTS]) * 32


def size_of(path: Path) -> int:
    """Of a segment's file: nothing once it is removed, which may happen at any moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class DiskMachine(RuleBasedStateMachine):
    """The model: which objects are safe (stored, and not known to be dropped), and which slots somebody has damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="vm-"))
        self.directory = self.home / "0"
        load_or_create_key(self.directory)
        self.number = 0
        self.safe: dict[bytes, set[PageKey]] = {namespace: set() for namespace in NAMESPACES}
        self.damaged: set[PageKey] = set()
        self.num_foreign: int | None = 0  # segments of the other namespace; None: some had to go
        self.open(NAMESPACES[0], QUOTAS[0])

    # --- the tier, and waiting for it ---

    def open(self, namespace: bytes, quota: int) -> None:
        self.namespace, self.quota = namespace, quota
        self.tier = DiskTier(DiskOptions(self.directory, quota, segment_bytes=1 << 16), FORMATS)
        self.tier.serve_namespace(namespace)
        self.names = {PageKey(page_name(name), form.group): name for name in range(NUM_NAMES) for form in FORMATS}
        self.in_flight: dict[TierTicket, tuple[PageKey, np.ndarray | None]] = {}
        self.written: set[TierTicket] = set()  # stores of objects that were not there
        self.wait(lambda: self.tier.is_adopted)

    def wait(self, is_over) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.evicted = set(self.tier.poll_evicted())
            for result in self.tier.poll_finished():
                self.take(result)
            self.mine.difference_update(key for key in self.evicted if self.tier.contains([key]) == [False])
            if is_over():
                return
            assert time.monotonic() < deadline, (self.tier.statistics(), self.in_flight.keys())
            time.sleep(0.0005)

    @property
    def mine(self) -> set[PageKey]:
        return self.safe[self.namespace]

    def take(self, result: TransferResult) -> None:
        key, data = self.in_flight.pop(result.ticket)
        if data is None:
            if result.outcome is TransferOutcome.DONE:
                self.mine.add(key)
                if result.ticket in self.written:
                    self.damaged.discard(key)
            return
        if result.outcome is TransferOutcome.DONE:
            assert (data == content(key)).all(), "wrong bytes"
        else:
            assert key not in self.mine - self.damaged - self.evicted, f"a safe object is {result.outcome}"
            self.mine.discard(key)

    def ticket(self) -> TierTicket:
        self.number += 1
        return TierTicket("machine", self.number)

    # --- the manager ---

    @rule(some=names, form=forms, waits=st.booleans())
    def store(self, some: list[int], form: ObjectFormat, waits: bool) -> None:
        for name in some:
            key = PageKey(page_name(name), form.group)
            if any(other == key for other, data in self.in_flight.values() if data is None):
                continue
            self.tier.can_accept(form.object_bytes)
            ticket, data = self.ticket(), content(key)
            self.in_flight[ticket] = key, None
            if self.tier.contains([key]) == [False]:
                self.written.add(ticket)
            views = [data[start : start + 4096] for start in range(0, len(data), 4096)]
            request = StoreRequest(ticket, key, b"p" * 32, root_of(name), form, views, checksums(key, data))
            self.tier.submit_store(request)
        if waits:
            self.wait(lambda: not self.in_flight)

    @rule(some=names, form=forms, waits=st.booleans())
    def load(self, some: list[int], form: ObjectFormat, waits: bool) -> None:
        for name in some:
            key = PageKey(page_name(name), form.group)
            ticket, data = self.ticket(), np.zeros(form.object_bytes, np.uint8)
            self.in_flight[ticket] = key, data
            views = [data[start : start + 4096] for start in range(0, len(data), 4096)]
            self.tier.submit_load(LoadRequest(ticket, key, form, views))
        if waits:
            self.wait(lambda: not self.in_flight)

    @rule(some=names)
    def touch(self, some: list[int]) -> None:
        self.tier.touch([PageKey(page_name(name), "full") for name in some])

    @rule(some=names, form=forms)
    def evict(self, some: list[int], form: ObjectFormat) -> None:
        self.wait(lambda: not self.in_flight)
        keys = [PageKey(page_name(name), form.group) for name in some]
        self.tier.evict(keys)
        assert not any(self.tier.contains(keys))
        self.mine.difference_update(keys)

    @rule(root=st.none() | st.integers(0, NUM_ROOTS - 1), restarts=st.booleans())
    def flush(self, root: int | None, restarts: bool) -> None:
        self.wait(lambda: not self.in_flight)
        self.tier.evict_root(root_of(root) if root is not None else None)
        gone = [key for key, name in self.names.items() if root is None or root_of(name) == root_of(root)]
        assert not any(self.tier.contains(gone))
        self.mine.difference_update(gone)
        self.wait(lambda: not self.tier.num_leaving())
        if restarts:
            self.restart(self.quota, False)
            assert not any(self.tier.contains(gone)), "a flush is for ever"

    # --- what happens to servers, and to disks ---

    @rule(quota=st.sampled_from(QUOTAS), other=st.booleans())
    def restart(self, quota: int, other: bool) -> None:
        self.wait(lambda: not self.in_flight)
        if self.tier.statistics()["foreign_segments"] != self.num_foreign:
            self.num_foreign = None
        self.tier.close(DEADLINE_S)
        self.reopen(quota, NAMESPACES[1 - NAMESPACES.index(self.namespace)] if other else self.namespace)

    def reopen(self, quota: int, namespace: bytes) -> None:
        """What is safe is found, unless its segment had to go for the quota."""
        self.open(namespace, quota)
        statistics = self.tier.statistics()
        found = {key for key in self.names if self.tier.contains([key]) == [True]}
        if statistics.get("shrunk_segments", 0) or self.num_foreign is None:
            for each in NAMESPACES:
                self.safe[each] = self.safe[each] & found if each == namespace else set()
        self.num_foreign = statistics["foreign_segments"]
        assert self.mine <= found

    @rule()
    def crash(self) -> None:
        """Go on with a copy of this moment; what is in flight may have come to the disk or not."""
        self.mine.difference_update(self.tier.poll_evicted())
        before, copy = self.directory, self.home / str(self.number + 10**6)
        self.number += 1
        copy.mkdir(mode=0o700)
        # The index first, as of one moment: a row's bytes are on disk before it.
        with (
            contextlib.closing(sqlite3.connect(before / "index.sqlite")) as source,
            contextlib.closing(sqlite3.connect(copy / "index.sqlite")) as target,
        ):
            source.backup(target)
        for path in [before / "key", *before.glob("segment-*")]:
            with contextlib.suppress(FileNotFoundError):  # a segment that is being removed
                shutil.copy(path, copy / path.name)
        in_flight = {key for key, _ in self.in_flight.values()}
        old = self.tier
        self.directory = copy
        old.close(DEADLINE_S)
        self.mine.difference_update(old.poll_evicted())
        shutil.rmtree(before)
        self.damaged |= in_flight
        self.num_foreign = None
        self.reopen(self.quota, self.namespace)

    @rule(pick=st.integers(0, 999), byte=st.integers(0, 4095), bit=st.integers(0, 7))
    def damage(self, pick: int, byte: int, bit: int) -> None:
        """A bit of an object that is there changes."""
        self.wait(lambda: not self.in_flight)
        here = sorted(key for key in self.mine if self.tier.contains([key]) == [True])
        if not here:
            return
        key = here[pick % len(here)]
        target = self.tier._space.find(key)
        assert target is not None
        place = target.slot * aligned(BY_GROUP[key.group].object_bytes) + byte
        with (self.directory / f"segment-{target.segment:08d}").open("r+b") as file:
            file.seek(place)
            was = file.read(1)[0]
            file.seek(place)
            file.write(bytes([was ^ 1 << bit]))
        self.damaged.add(key)

    # --- always ---

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.tier.check_integrity() == []
        assert sum(map(size_of, self.directory.glob("segment-*"))) <= max(self.quota, QUOTAS[1])

    def teardown(self) -> None:
        """Every object is right, no slot is lost, and the check of the directory finds the damage and nothing else."""
        self.wait(lambda: not self.in_flight and not self.tier.num_leaving())
        for name in range(NUM_NAMES):
            for form in FORMATS:
                self.load([name], form, False)
        damaged = self.damaged & {key for key in self.names if self.tier.contains([key]) == [True]}
        self.wait(lambda: not self.in_flight and not self.tier.num_leaving())
        for segment in self.tier._space.segments.values():
            assert len(segment.free) + len(segment.objects) == segment.row.num_slots, "a slot is lost"
        assert self.tier.statistics().get("errors", 0) == 0
        self.tier.close(DEADLINE_S)
        problems = [problem.text for problem in check_directory(self.directory).problems]
        assert len(problems) <= len(damaged) + len(self.damaged), problems
        shutil.rmtree(self.home)


DiskMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDiskMachine = pytest.mark.timeout(240)(DiskMachine.TestCase)
