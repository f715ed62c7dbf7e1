"""Streams for a long time over tiers that are all too small: `python test/soak.py --seconds 1200`, or `make soak`.

The working set is three times the host tier and the device pool, and twice the disk quota, so that a sixth of the
prompts is on disk alone; what is there is loaded, whether it pays or not. At the end every text has been right, every
tier has been hit, the books are in order, no process has grown, and prompts were found about as often as an LRU would.
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "support")]

import torch  # noqa: E402
from real_server import serve  # noqa: E402
from tiny_engine import FLAGS, PAGE, PAGE_BYTES, CacheServer, TinyModel, Tokens, make_prompt, usable  # noqa: E402

PAGES_A_PROMPT = 5
NUM_PROMPTS = 48
WORKING_SET = PAGES_A_PROMPT * NUM_PROMPTS  # pages
HOST_PAGES = WORKING_SET // 3
DEVICE_PAGES = WORKING_SET // 3
DISK_PAGES = WORKING_SET // 2
NUM_STREAMS = 8
SAMPLE_S = 2.0
MAX_GROWTH_BYTES = 24 << 20  # of a process, between the second fifth of the time and the last one
MAX_GROWTH_FILES = 8  # open files of a process
MAX_ABOVE, MAX_BELOW = 0.05, 0.25  # of the predicted hit rates
GIB = 2**30


class LruPrediction:
    """What an LRU of so many prompts would have hit, of the accesses as they came."""

    def __init__(self, num_prompts: int) -> None:
        self._capacity = num_prompts
        self._held: OrderedDict[int, None] = OrderedDict()
        self.num_hits = 0

    def use(self, prompt: int) -> None:
        self.num_hits += prompt in self._held
        self._held[prompt] = None
        self._held.move_to_end(prompt)
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)


@dataclass
class Tally:
    """What all streams have seen."""

    num_answers: int = 0
    num_usable: int = 0  # tokens
    by_tier: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # tokens
    wrong: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    smallest: LruPrediction = field(default_factory=lambda: LruPrediction(HOST_PAGES // PAGES_A_PROMPT))
    largest: LruPrediction = field(
        default_factory=lambda: LruPrediction((HOST_PAGES + DEVICE_PAGES + DISK_PAGES) // PAGES_A_PROMPT)
    )

    @property
    def hit_rate(self) -> float:
        return sum(self.by_tier.values()) / max(1, self.num_usable)


class Soak:
    """Streams and the watch over the memory of all processes."""

    def __init__(self, server: CacheServer, prompts: list[Tokens], seed: int) -> None:
        self.tally = Tally()
        self.memory: dict[str, list[int]] = defaultdict(list)
        self.files: dict[str, list[int]] = defaultdict(list)
        self._server = server
        self._prompts = prompts
        self._seed = seed
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        """Until the time is over and every stream has ended."""
        threads = [threading.Thread(target=self._stream, args=(index,)) for index in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(SAMPLE_S, max(0.0, end - time.monotonic())))
            for process in self._server.server.children():
                role = " ".join(process.cmdline()[-3:-1])
                self.memory[role].append(process.memory_full_info().uss)
                self.files[role].append(process.num_fds())
        self._stop.set()
        for thread in threads:
            thread.join()

    def _stream(self, index: int) -> None:
        generator = random.Random(self._seed * NUM_STREAMS + index)
        while not self._stop.is_set():
            number = generator.randrange(len(self._prompts))
            with self._lock:
                self.tally.smallest.use(number)
                self.tally.largest.use(number)
            try:
                self._one(number)
            except Exception as error:
                self.tally.errors.append(repr(error))
                time.sleep(0.5)

    def _one(self, number: int) -> None:
        prompt = self._prompts[number]
        answer = self._server.ask(prompt)
        with self._lock:
            tally = self.tally
            tally.num_answers += 1
            tally.num_usable += usable(prompt)
            for tier in ("device", "host", "disk"):
                tally.by_tier[tier] += getattr(answer, tier)
            if answer.tokens != self._server.model.text(prompt):
                tally.wrong.append(number)


def growth(samples: list[int]) -> float:
    """Between the second fifth and the last fifth."""
    fifth = max(1, len(samples) // 5)
    return statistics.median(samples[-fifth:]) - statistics.median(samples[fifth : 2 * fifth] or samples[:1])


def judge(soak: Soak, is_long: bool) -> list[str]:
    """What is wrong. A short run says nothing about memory: allocators have not come to rest."""
    tally, problems = soak.tally, []
    if tally.wrong:
        problems.append(f"{len(tally.wrong)} answers are wrong")
    if tally.errors:
        problems.append(f"{len(tally.errors)} requests failed: {tally.errors[0]}")
    problems += [f"nothing came from {tier}" for tier in ("device", "host", "disk") if not tally.by_tier[tier]]
    low, high = (each.num_hits / max(1, tally.num_answers) for each in (tally.smallest, tally.largest))
    if not low - MAX_BELOW <= tally.hit_rate <= high + MAX_ABOVE:
        problems.append(f"the hit rate {tally.hit_rate:.2f} is far from the {low:.2f} to {high:.2f} of an LRU")
    for role, samples in soak.files.items():
        if growth(samples) > MAX_GROWTH_FILES:
            problems.append(f"{role} has {growth(samples):.0f} more open files")
    if is_long:
        for role, samples in soak.memory.items():
            if growth(samples) > MAX_GROWTH_BYTES:
                problems.append(f"{role} has grown by {growth(samples) / 2**20:.0f} MiB")
    return problems


def summarize(soak: Soak, seconds: float) -> str:
    tally = soak.tally
    count = max(1, tally.num_answers)
    tiers = ", ".join(f"{tier} {tokens / max(1, tally.num_usable):.2f}" for tier, tokens in tally.by_tier.items())
    lines = [
        f"{tally.num_answers} answers in {seconds:.0f} s, {len(tally.wrong)} wrong, {len(tally.errors)} failed",
        f"hit rate {tally.hit_rate:.2f} ({tiers}); an LRU of the host's size: {tally.smallest.num_hits / count:.2f}, "
        f"of all tiers together: {tally.largest.num_hits / count:.2f}",
    ]
    for role, samples in soak.memory.items():
        lines.append(f"{role}: {samples[-1] / 2**20:.0f} MiB, growth {growth(samples) / 2**20:+.1f} MiB")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as name:
        directory = Path(name)
        (directory / "model").mkdir()
        model = TinyModel(directory / "model")
        prompts = [make_prompt(PAGES_A_PROMPT * PAGE + 3, ("soak", number)) for number in range(NUM_PROMPTS)]
        for prompt in prompts:
            model.text(prompt)
        flags = [
            *("--max_total_token_num", str(DEVICE_PAGES * PAGE), "--enable_cpu_cache", "--enable_disk_cache"),
            *("--cpu_cache_storage_size", str(HOST_PAGES * PAGE_BYTES / GIB)),
            *("--disk_cache_storage_size", str(DISK_PAGES * PAGE_BYTES / GIB)),
            *("--disk_cache_dir", str(directory / "pages"), "--cpu_cache_load_policy", "always"),
        ]
        with serve(directory / "run", directory / "log", str(model.path), *FLAGS, *flags) as server:
            soak = Soak(CacheServer(server, model), prompts, options.seed)
            soak.run(options.seconds)
            cache = CacheServer(server, model).check_clean()
    print(summarize(soak, options.seconds))
    names = ("pages_published", "pages_persisted", "pages_promoted", "drops", "checksum_failures", "lower_tier")
    print("; ".join(f"{name} {cache[name]}" for name in names))
    problems = judge(soak, is_long=options.seconds >= 300)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
