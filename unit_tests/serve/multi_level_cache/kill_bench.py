"""Lives of a cache manager over real files, each in a process of its own that a kill point ends.

`python -m unit_tests.serve.multi_level_cache.kill_bench` reads one life a line (a JSON list: directory, fault, quota,
namespace, whether it flushes prompts) and answers with the exit code. It forks, since imports take longer than a life.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serve.ipc.messages import AcquireReply, PageRange
from serve.multi_level_cache.checksum import object_checksums, unit_seeds
from serve.multi_level_cache.disk_room import DiskOptions
from serve.multi_level_cache.disk_tier import DiskTier
from serve.multi_level_cache.fault_injector import FaultInjector, parse_faults
from serve.multi_level_cache.faulty_tier import FaultyTier
from serve.multi_level_cache.object_format import ObjectFormat
from serve.multi_level_cache.page_state import PageKey
from serve.multi_level_cache.request_names import RequestNames
from serve.types import AcquireOutcome, JobId
from unit_tests.serve.multi_level_cache.builders import FORMATS, Bench, request

NUM_SLOTS = 96
PAGES = 5
PROMPTS_A_ROUND = 3
MAX_ROUNDS = 60
SEGMENT_BYTES = 1 << 16
NOT_KILLED = 5
DEADLINE_S = 30.0
BY_GROUP = {form.group: form for form in FORMATS}


def content(key: PageKey) -> np.ndarray:
    """The bytes that an object must have, and no other has."""
    form = BY_GROUP[key.group]
    seed = [int.from_bytes(key.name[:8], "little"), form.group_index]
    return np.random.default_rng(seed).integers(0, 256, form.object_bytes, dtype=np.uint8)


class Life:
    """Stores prompts, lets them go from the host, brings them back, and compares every byte that it gets."""

    def __init__(self, directory: Path, fault: str, quota: int, namespace: bytes) -> None:
        injector = FaultInjector(parse_faults(fault))
        self.skipped_s = 0.0
        options = DiskOptions(directory, quota, segment_bytes=SEGMENT_BYTES)
        self.disk = DiskTier(options, FORMATS, lambda: time.time() + self.skipped_s, injector)
        self.disk.serve_namespace(namespace)
        self.bench = Bench(NUM_SLOTS, FaultyTier(self.disk, injector))
        self.life = os.urandom(8).hex()
        self.log = os.open(directory.parent / "durable", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.told: set[PageKey] = set()
        self._asked: dict[JobId, RequestNames] = {}
        self._pump(lambda: self.disk.is_adopted)

    def _pump(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.bench.manager.tick()
            self._tell_durable()
            if is_over():
                return
            assert time.monotonic() < deadline, "nothing goes on"
            time.sleep(0.0005)

    def _tell_durable(self) -> None:
        """What the manager believes to be safe, for whoever looks at the directory afterwards."""
        pages = [page for page in self.bench.host.directory.pages() if page.durability.name == "DURABLE"]
        for page in pages:
            if page.key not in self.told:
                self.told.add(page.key)
                os.write(self.log, f"{page.key.name.hex()} {page.key.group}\n".encode())

    def run(self, flushes: bool) -> None:
        prompts: list[RequestNames] = []
        for number in range(MAX_ROUNDS):
            fresh = [request(f"{number} {index}", *range(PAGES), self.life) for index in range(PROMPTS_A_ROUND)]
            for prompt in fresh:
                self._store(prompt)
            # While these are on their way down, older ones come up.
            for prompt in prompts[-PROMPTS_A_ROUND * 4 :: 4]:
                self._ask(prompt)
            self._pump(lambda: self._is_persisted() and not self._waiting)
            prompts += fresh
            self._empty_host()
            if flushes and number % 3 == 2:
                self.disk.evict_root(prompts.pop(0).root)
            self.skipped_s += 61.0  # last uses are written each minute

    # --- what a router and workers do ---

    def _store(self, prompt: RequestNames) -> None:
        last = len(prompt.names) - 1
        reply = self.bench.claim(prompt, PageRange("full", 0, last + 1), PageRange("state", last, 1))
        arena = self.bench.arena
        for group, index, slots, _ in reply.granted:
            form, key = BY_GROUP[group], PageKey(prompt.names[index], group)
            data = content(key)
            self._spread(data, slots)
            arena.checksum[slots[0], : len(form.unit_bytes)] = checksums(key, data)
        self.bench.finish_store(reply)

    def _spread(self, data: np.ndarray, slots: list[int]) -> None:
        size = self.bench.arena.shape.slot_bytes
        for position, slot in enumerate(slots):
            part = data[position * size : (position + 1) * size]
            self.bench.arena.payload[slot, : len(part)] = part

    @property
    def _waiting(self) -> dict[JobId, RequestNames]:
        """Acquires without a reply; grants are compared and ended."""
        for reply in self.bench.post.take():
            assert isinstance(reply, AcquireReply)
            prompt = self._asked.pop(reply.job)
            if reply.outcome is AcquireOutcome.GRANTED:
                self._compare(prompt, reply)
        return self._asked

    def _ask(self, prompt: RequestNames) -> None:
        last = len(prompt.names) - 1
        job = self.bench.job()
        self._asked[job] = prompt
        self.bench.acquire_later(prompt, PageRange("full", 0, last + 1), PageRange("state", last, 1), job=job)

    def _compare(self, prompt: RequestNames, reply: AcquireReply) -> None:
        keys = [PageKey(name, "full") for name in prompt.names], [PageKey(prompt.names[-1], "state")]
        for wanted, slots in zip(keys, reply.slots, strict=True):
            share = len(slots) // len(wanted)
            for index, key in enumerate(wanted):
                data = self.bench.arena.payload[slots[index * share : (index + 1) * share]].reshape(-1)
                assert (data[: BY_GROUP[key.group].object_bytes] == content(key)).all(), "wrong bytes"
        self.bench.begin(reply.job)
        self.bench.answer(reply.job)

    def _is_persisted(self) -> bool:
        in_flight = any(page.durability.name == "PERSISTING" for page in self.bench.host.directory.pages())
        is_left = any(page.durability.name == "VOLATILE" for page in self.bench.host.directory.pages())
        return not in_flight and not (is_left and self.disk.can_accept(4096) and self.disk.can_accept(10000))

    def _empty_host(self) -> None:
        for room in range(NUM_SLOTS, 0, -1):
            if self.bench.host.directory.make_room(room):
                return


def checksums(key: PageKey, data: np.ndarray) -> np.ndarray:
    form: ObjectFormat = BY_GROUP[key.group]
    return object_checksums(data, form.unit_bytes, unit_seeds([key.name], form.group_index, form.unit_bytes)[0])


def main() -> None:
    for line in sys.stdin:
        directory, fault, quota, namespace, flushes = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(f"{directory}/../stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            Life(Path(directory), fault, quota, bytes.fromhex(namespace)).run(flushes)
            os._exit(NOT_KILLED)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
