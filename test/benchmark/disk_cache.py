"""What the disk tier promises, measured: `python test/benchmark/disk_cache.py [--directory D] [--json FILE]`.

Each figure is paired with what it is compared to, in turns within the same minutes, on the disk of `--directory`:
- restore: pages brought into the host against plain direct reads of the same bytes (second lap on);
- first token: a 3,000-token prefix from disk, after a restart, against computing it;
- slow disk: the same prompts with a disk that the fault injector slows down against no disk tier at all;
- large index: a start with 200,000 pages in the index against one with none.

It takes three to five minutes on two cores, and ends with 1 when a promise is not kept.
"""

import argparse
import json
import mmap
import os
import random
import select
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "support")]

import numpy as np  # noqa: E402
from real_server import Server, serve  # noqa: E402

from serve.multi_level_cache.checksum import object_checksums, unit_seeds  # noqa: E402
from serve.multi_level_cache.disk_index import DiskIndex, ObjectRow, SegmentRow  # noqa: E402
from serve.multi_level_cache.disk_room import DiskOptions  # noqa: E402
from serve.multi_level_cache.disk_tier import DiskTier  # noqa: E402
from serve.multi_level_cache.object_format import ObjectFormat  # noqa: E402
from serve.multi_level_cache.page_state import PageKey, TierTicket  # noqa: E402
from serve.multi_level_cache.secondary_tier import LoadRequest, StoreRequest, TransferOutcome  # noqa: E402

MODEL = "smollm2-135m"
VOCABULARY = 49152
PREFIX = 3000  # tokens
FORMAT = ObjectFormat("full", 0, 64, (491520, 491520, 491520))  # a page of SmolLM2-135M in bfloat16
NUM_PAGES = 128
LAPS = 6
INDEX_PAGES = 200_000
GIB = 2**30


@dataclass
class Result:
    """One comparison. ratio: of medians (of means where `slow` requests must not hide), ours to the other's."""

    name: str
    unit: str
    ours: list[float]
    other: list[float]
    at_least: float | None = None
    at_most: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    uses_means: bool = False

    @property
    def ratio(self) -> float:
        average = statistics.mean if self.uses_means else statistics.median
        return average(self.ours) / average(self.other)

    @property
    def difference(self) -> float:
        return statistics.median(self.ours) - statistics.median(self.other)

    def is_kept(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


# --- restore -------------------------------------------------------------------------------------------------------


class Restore:
    """A disk tier with pages in it, and memory like the host's."""

    def __init__(self, directory: Path) -> None:
        self._tier = DiskTier(DiskOptions(directory, 2 * GIB), [FORMAT])
        self._tier.serve_namespace(b"b" * 32)
        while not self._tier.is_adopted:
            self._wait()
            self._tier.poll_finished()
        memory = mmap.mmap(-1, NUM_PAGES * FORMAT.object_bytes)
        self._pages = np.frombuffer(memory, np.uint8).reshape(NUM_PAGES, -1)
        dice = np.random.default_rng(0)
        self._keys = [PageKey(dice.bytes(32), "full") for _ in range(NUM_PAGES)]
        self._pages[:] = np.frombuffer(dice.bytes(self._pages.size), np.uint8).reshape(self._pages.shape)
        self._store()
        index = DiskIndex(directory)
        rows = [(row.segment, row.slot) for segment in index.segments() for row in index.objects(segment.number)]
        index.close()
        (self._segment,) = {segment for segment, _ in rows}
        self._path, self._first = directory / f"segment-{self._segment:08d}", min(slot for _, slot in rows)

    def _wait(self) -> None:
        select.select([self._tier.fileno()], [], [], 1.0)

    def _finish(self) -> None:
        left = NUM_PAGES
        while left:
            for result in self._tier.poll_finished():
                if result.outcome is not TransferOutcome.DONE:
                    raise RuntimeError(f"a transfer is {result.outcome.value}")
                left -= 1
            if left:
                self._wait()

    def _store(self) -> None:
        for number, (key, page) in enumerate(zip(self._keys, self._pages, strict=True)):
            sums = object_checksums(page, FORMAT.unit_bytes, unit_seeds([key.name], 0, FORMAT.unit_bytes)[0])
            while not self._tier.can_accept(FORMAT.object_bytes):
                time.sleep(0.01)
            ticket = TierTicket("store", number)
            self._tier.submit_store(StoreRequest(ticket, key, b"", b"", FORMAT, [page], sums))
        self._finish()

    def restore(self) -> float:
        """Bytes a second into memory, checked."""
        self._pages[:] = 0
        began = time.perf_counter()
        for number, (key, page) in enumerate(zip(self._keys, self._pages, strict=True)):
            self._tier.submit_load(LoadRequest(TierTicket("load", number), key, FORMAT, [page]))
        self._finish()
        return self._pages.size / (time.perf_counter() - began)

    def read_plainly(self, request_bytes: int = 8 << 20, num_threads: int = 4) -> float:
        """Bytes a second of direct reads of the same bytes of the same file, nothing done with them."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        start, size = self._first * FORMAT.object_bytes, self._pages.size
        offsets = list(range(start, start + size, request_bytes))

        def read(mine: list[int]) -> None:
            buffer = mmap.mmap(-1, request_bytes)
            for offset in mine:
                os.preadv(fd, [buffer], offset)

        threads = [threading.Thread(target=read, args=(offsets[index::num_threads],)) for index in range(num_threads)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - began
        os.close(fd)
        return size / elapsed

    def close(self) -> None:
        self._tier.close(10)


def measure_restore(directory: Path) -> Result:
    disk = Restore(directory)
    disk.read_plainly(), disk.restore()
    ours, other = [], []
    for _ in range(LAPS):
        other.append(disk.read_plainly() / 1e9)
        ours.append(disk.restore() / 1e9)
    disk.close()
    return Result("restore against plain direct reads", "GB/s", ours, other, at_least=0.8)


# --- servers -------------------------------------------------------------------------------------------------------


class Prompts:
    """Prompts of random tokens: a prefix that a seed names, and a few tokens that no other request has."""

    def __init__(self) -> None:
        self._dice = random.Random(7)

    def __call__(self, seed: int) -> list[int]:
        prefix = random.Random(seed)
        tokens = [prefix.randrange(100, VOCABULARY) for _ in range(PREFIX)]
        return tokens + [self._dice.randrange(100, VOCABULARY) for _ in range(8)]


def first_token(server: Server, prompt: list[int]) -> tuple[float, dict[str, int]]:
    """Seconds to the only token of an answer, and cached tokens by tier."""
    began = time.perf_counter()
    body = server.complete(prompt, 1)
    elapsed = time.perf_counter() - began
    return elapsed, body["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


def settle(server: Server) -> None:
    """Until all that can be on disk is."""
    client = server.control("cache")
    try:
        for _ in range(600):
            found = client.call("statistics")
            if not found["leases"] and not found["objects"]["durability"].get("persisting", 0):
                return
            time.sleep(0.1)
    finally:
        client.close()


class Servers:
    """Starts servers one after the other, with a disk directory or without."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._number = 0

    @contextmanager
    def __call__(self, disk: Path | None, *flags: str, disk_gib: float = 8) -> Iterator[Server]:
        self._number += 1
        tiers = ["--enable_cpu_cache", "--cpu_cache_storage_size", "1"]
        if disk is not None:
            tiers += ["--enable_disk_cache", "--disk_cache_dir", str(disk), "--disk_cache_storage_size", str(disk_gib)]
        pool = ["--max_total_token_num", "4096", "--max_req_total_len", "4000"]
        log = self._home / f"log-{self._number}"
        with serve(self._home / f"run-{self._number}", log, MODEL, *pool, *tiers, *flags) as server:
            server.complete(list(range(100, 160)), 2)
            yield server


def measure_first_token(servers: Servers, disk: Path, make: Prompts, num_pairs: int) -> Result:
    with servers(disk) as server:
        for seed in range(2 * num_pairs):
            first_token(server, make(seed))
        settle(server)
    ours, other, found = [], [], []
    with servers(disk) as server:
        for seed in range(num_pairs):
            other.append(first_token(server, make(1000 + seed))[0])
            settle(server)
            elapsed, tiers = first_token(server, make(seed))
            ours.append(elapsed)
            found.append(tiers["disk"] + tiers["host"])
    if min(found) < PREFIX // 64 * 64:
        print(f"not all of the prefixes came from disk: {found}", file=sys.stderr)
    notes = {"tokens from disk": found}
    return Result("first token from disk against computing", "s", ours, other, at_most=1 / 12, notes=notes)


def measure_slow_disk(servers: Servers, disk: Path, make: Prompts, num_pairs: int) -> Result:
    """Reads of a page take a second: bringing a prefix up takes longer than to compute it."""
    ours, other = [], []
    with (
        servers(disk, "--fault_inject", "disk.pread:delay=1.0") as slow,
        servers(None) as without,
    ):
        for seed in range(2 * num_pairs):
            pair = [(slow, ours), (without, other)]
            for server, times in pair if seed % 2 else reversed(pair):
                times.append(first_token(server, make(seed))[0])
                settle(server)
    # Noise of pairs is about as large as what is to be shown.
    return Result("slowed disk against no disk tier", "s", ours, other, at_most=1.05, uses_means=True)


def measure_large_index(servers: Servers, disk: Path, num_pairs: int) -> Result:
    """Rows of the server's own namespace and format, in sparse segments."""
    index = DiskIndex(disk)
    segments = index.segments()
    namespace, slot_bytes = segments[0].namespace, segments[0].slot_bytes
    index.close()
    large, empty = disk.parent / "large", disk.parent / "empty"
    for directory in (large, empty):
        directory.mkdir(mode=0o700)
        shutil.copy(disk / "key", directory / "key")
    fill_index(large, namespace, slot_bytes)
    ours, other, adopted = [], [], []
    for _ in range(num_pairs):
        for directory, times in ((empty, other), (large, ours)):
            with servers(directory, disk_gib=400) as server:
                times.append(server.start_s)
                if directory is large:
                    adopted.append(wait_until_adopted(server))
    notes = {"seconds until all pages are known, after that": adopted}
    result = Result("start with 200,000 pages against an empty index", "s", ours, other, notes=notes)
    result.at_most = 1.0
    return result


def fill_index(directory: Path, namespace: bytes, slot_bytes: int) -> None:
    per_segment = GIB // slot_bytes
    index, dice = DiskIndex(directory), random.Random(3)
    for number in range(1, -(-INDEX_PAGES // per_segment) + 1):
        index.add_segment(SegmentRow(number, namespace, slot_bytes, per_segment))
        with (directory / f"segment-{number:08d}").open("wb") as file:
            file.truncate(per_segment * slot_bytes)
    sums = bytes(8 * len(FORMAT.unit_bytes))
    rows = [
        ObjectRow(
            1 + page // per_segment,
            page % per_segment,
            PageKey(dice.randbytes(32), "full"),
            dice.randbytes(32),
            sums,
            time.time() - dice.random() * 1e6,
        )
        for page in range(INDEX_PAGES)
    ]
    index.change(rows, [])
    index.close()


def wait_until_adopted(server: Server) -> float:
    began = time.perf_counter()
    client = server.control("cache")
    try:
        while True:
            tier = client.call("statistics")["lower_tier"]
            if tier["is_adopted"]:
                if tier["num_objects"] < INDEX_PAGES:
                    raise RuntimeError(f"{tier['num_objects']} pages are known, not {INDEX_PAGES}")
                return time.perf_counter() - began
            time.sleep(0.02)
    finally:
        client.close()


# --- all of it -----------------------------------------------------------------------------------------------------


def report(result: Result, value: float, what: str) -> bool:
    ours, other = statistics.median(result.ours), statistics.median(result.other)
    limit = f"at least {result.at_least:.3g}" if result.at_least is not None else f"at most {result.at_most:.3g}"
    verdict = "kept" if result.is_kept(value) else "MISSED"
    print(f"{result.name}: {ours:.3f} and {other:.3f} {result.unit}, {what} {value:.3f} ({limit}): {verdict}")
    for name, note in result.notes.items():
        print(f"    {name}: {note}")
    return result.is_kept(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; default: where temporary files go")
    parser.add_argument("--only", default="restore,first_token,slow_disk,large_index", help="parts, by commas")
    parser.add_argument("--pairs", type=int, default=5, help="how often each is measured")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    parts = options.only.split(",")
    kept, results = True, []
    with (
        tempfile.TemporaryDirectory(prefix="vd-", dir=options.directory) as where,
        tempfile.TemporaryDirectory(prefix="vb-", dir="/tmp") as home,
    ):
        disk, servers, make = Path(where) / "pages", Servers(Path(home)), Prompts()
        needs_pages = bool({"slow_disk", "large_index"} & set(parts))
        steps: list[tuple[str, Callable[[], Result], str]] = [
            ("restore", lambda: measure_restore(Path(where) / "restore"), "ratio"),
            ("first_token", lambda: measure_first_token(servers, disk, make, options.pairs), "ratio"),
            ("slow_disk", lambda: measure_slow_disk(servers, disk, make, options.pairs), "ratio"),
            ("large_index", lambda: measure_large_index(servers, disk, min(3, options.pairs)), "difference"),
        ]
        for name, measure, what in steps:
            if name in parts or (name == "first_token" and needs_pages):
                result = measure()
                kept &= report(result, getattr(result, what), what)
                results.append({**asdict(result), what: getattr(result, what)})
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
