"""Faults on purpose under 16 streams: every request ends, and its text is that of a run without faults."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import CacheServer, Load, Tokens, make_prompt, make_trees

NUM_STREAMS = 16
POOL = ("--max_total_token_num", "2048")
HOST_PAGES = 64
NO_FAULT = "host.copy_in:delay=0:n=1"
"""Of a server that is told its faults while it runs."""
RATES = {"delay=0.05": ":p=0.3", "fail": ":p=0.3", "drop": ":p=0.3", "bitflip": ":p=0.3", "hang": ":n=2"}
WORKER, MANAGER = "worker-0", "cache"


@pytest.fixture(scope="module")
def served(start_tiers: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    """The working set is far larger than the host, so that all sites have work all the time."""
    disk = tmp_path_factory.mktemp("faults") / "pages"
    with start_tiers(*POOL, "--fault_inject", NO_FAULT, host_pages=HOST_PAGES, disk=disk) as server:
        yield server


def run_rounds(server: CacheServer, seed: str, num_rounds: int) -> None:
    """All prompts by 16 streams, again and again, the device emptied in between. Each text is compared."""
    prompts = make_trees(8, 4, seed, 4 * 16)
    for _ in range(num_rounds):
        server.check_all(prompts, NUM_STREAMS)
        server.call("router", "flush")


def counts(server: CacheServer) -> dict[str, int]:
    """What happened so far: faults, and how jobs and transfers ended."""
    router, cache = server.call("router", "statistics"), server.cache_statistics()
    jobs = server.call(WORKER, "status")["jobs"]
    told = {"checksum_failures": cache["checksum_failures"], "slow": router["tiers"]["loads"]["num_dropped_slow"]}
    told |= {f"{way}_failed": router["tiers"][way]["num_jobs_failed"] for way in ("loads", "stores")}
    return told | dict(jobs["faults"]) | dict(cache["lower_tier"]["faults"])


@pytest.mark.parametrize("fault", RATES)
@pytest.mark.parametrize("site", ["host.copy_in", "host.copy_out"])
def test_a_fault_of_the_host_tier_by_itself(served: CacheServer, site: str, fault: str):
    before, kind = counts(served), fault.partition("=")[0]
    served.call(WORKER, "inject", faults=f"{site}:{fault}{RATES[fault]}")
    run_rounds(served, f"{site} {fault}", 2)
    served.call(WORKER, "inject", faults="")  # ends what hangs
    served.check_clean()
    after = counts(served)
    grown = {name for name, count in after.items() if count > before.get(name, 0)}
    assert f"{site}:{kind}" in grown
    if kind == "fail":
        assert ("loads_failed" if site == "host.copy_in" else "stores_failed") in grown, after
    if kind in ("drop", "bitflip"):  # lost or damaged on either way: caught when the page is loaded
        assert "checksum_failures" in grown, after
    if kind == "hang" and site == "host.copy_in":
        assert "slow" in grown, after


@pytest.mark.parametrize("fault", ["delay=0.05", "fail", "drop", "bitflip"])
@pytest.mark.parametrize("site", ["disk.read", "disk.write"])
def test_a_fault_of_the_disk_tier_by_itself(served: CacheServer, site: str, fault: str):
    before, kind = counts(served), fault.partition("=")[0]
    served.call(MANAGER, "inject", faults=f"{site}:{fault}{RATES[fault]}")
    run_rounds(served, f"{site} {fault}", 2)
    served.call(MANAGER, "inject", faults="")
    served.check_clean()
    after = counts(served)
    grown = {name for name, count in after.items() if count > before.get(name, 0)}
    assert f"{site}:{kind}" in grown
    if (site, kind) == ("disk.read", "bitflip"):
        assert "checksum_failures" in grown, after


SYSCALL_FAULTS = [
    "disk.pread:delay=0.3:p=0.2",
    "disk.pread:hang:n=2",
    "disk.pread:bitflip:p=0.1",
    "disk.pread:short:p=0.1",
    "disk.pread:fail:p=0.1",
    "disk.fdatasync:fail:n=3",
    "disk.pwrite:full:n=5",
    "disk.pwrite:short:n=5",
]
"""After an error nothing is stored for a minute: what cannot be read is lost, and a server has one bad store."""
SLOWEST_S = 20.0
"""The longest that a request may take: a grant is waited for at most 5 s, then it recomputes, on a busy machine."""


@pytest.fixture(scope="module")
def stored(start_tiers: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the pages of `syscall_prompts`, as a server has left it."""
    disk = tmp_path_factory.mktemp("syscalls") / "pages"
    with start_tiers(*POOL, disk=disk) as server:
        server.check_all(syscall_prompts(), NUM_STREAMS)
        server.settle()
    return disk


def syscall_prompts() -> list[Tokens]:
    return make_trees(6, 4, "syscalls", 4 * 16)


@pytest.fixture(scope="module")
def reading(start_tiers: Callable[..., Any], stored: Path) -> Iterator[CacheServer]:
    """Its host holds a small part of the pages that are on disk."""
    with start_tiers(*POOL, "--fault_inject", NO_FAULT, host_pages=24, disk=stored) as server:
        yield server


@pytest.mark.parametrize("rule", [rule for rule in SYSCALL_FAULTS if "pread" in rule])
def test_a_read_that_goes_wrong(reading: CacheServer, rule: str):
    """Each kind by itself: what does not come from disk is recomputed, in time and with the same text."""
    before, kind = reading.cache_statistics()["lower_tier"], rule.split(":")[1].partition("=")[0]
    reading.call(MANAGER, "inject", faults=rule)
    times = timed_rounds(reading, syscall_prompts(), 2)
    reading.call(MANAGER, "inject", faults="")
    after = reading.check_clean()["lower_tier"]
    assert max(times) < SLOWEST_S
    assert after["faults"].get(f"disk.pread:{kind}", 0) > before["faults"].get(f"disk.pread:{kind}", 0)
    counter = {"fail": "loads_failed", "bitflip": "loads_corrupt"}.get(kind)
    if counter is not None:
        assert after[counter] > before.get(counter, 0)


STORE_FAULTS = [
    rule if place % 3 == 0 else pytest.param(rule, marks=pytest.mark.slow)
    for place, rule in enumerate(rule for rule in SYSCALL_FAULTS if "pread" not in rule)
]


@pytest.mark.parametrize("rule", STORE_FAULTS)
def test_a_store_that_goes_wrong(start_tiers: Callable[..., Any], tmp_path: Path, rule: str):
    with start_tiers(*POOL, "--fault_inject", rule, host_pages=24, disk=tmp_path / "pages") as server:
        times = timed_rounds(server, syscall_prompts(), 2)
        tier = server.check_clean()["lower_tier"]
    assert max(times) < SLOWEST_S
    assert sum(tier["faults"].values()) == 1
    assert tier["stores_failed"] >= 1
    assert tier["errors"] >= 1
    assert tier["is_paused"]


def timed_rounds(server: CacheServer, prompts: list[Tokens], num_rounds: int) -> list[float]:
    """Seconds of each request of all streams; each text is compared."""

    def check(prompt: Tokens) -> float:
        began = time.monotonic()
        server.check(prompt)
        return time.monotonic() - began

    times: list[float] = []
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        for _ in range(num_rounds):
            times += pool.map(check, prompts)
            server.call("router", "flush")
    return times


def test_faults_of_all_kinds_at_all_sites_at_once(served: CacheServer):
    kinds = [fault for fault in RATES if fault != "hang"]
    for part, tier in ((WORKER, "host"), (MANAGER, "disk")):
        sites = ("host.copy_in", "host.copy_out") if tier == "host" else ("disk.read", "disk.write")
        served.call(part, "inject", faults=",".join(f"{site}:{kind}:p=0.1" for site in sites for kind in kinds))
    with Load(served, make_trees(8, 4, "all faults", 4 * 16)) as load:
        for number in range(3):
            served.check(make_prompt(1000, ("filler", number)), 1)
            served.call("router", "flush")
    for part in (WORKER, MANAGER):
        served.call(part, "inject", faults="")
    served.check_clean()
    assert load.wrong == []
    assert load.num_right
    assert not load.num_errors


@pytest.mark.parametrize(
    "rules",
    [
        "host.copy_in:hang:n=30,disk.write:hang:n=20,disk.write:hang:n=21",
        "host.copy_out:hang:n=60,disk.read:hang:p=0.2",
    ],
)
def test_hangs_that_never_end(start_tiers: Callable[..., Any], tmp_path: Any, rules: str):
    flags = (*POOL, "--fault_inject", rules)
    with start_tiers(*flags, host_pages=HOST_PAGES, disk=tmp_path / "pages") as server:
        run_rounds(server, "hangs", 3)
        server.check_clean(hung_jobs=1)


@pytest.mark.parametrize("site", ["host.copy_in", "host.copy_out"])
def test_a_flipped_bit_is_always_caught(served: CacheServer, site: str):
    """Every page that is copied has one: nothing is hit, and each is counted."""
    prompts = [make_prompt(16 * 6 + 5, ("flipped", site, number)) for number in range(8)]
    before = served.cache_statistics()["checksum_failures"]
    served.call(WORKER, "inject", faults=f"{site}:bitflip")
    served.check_all(prompts, NUM_STREAMS)
    served.flush_device()
    answers = served.check_all(prompts, NUM_STREAMS)
    served.call(WORKER, "inject", faults="")
    assert all(answer.host == 0 for answer in answers)
    assert served.check_clean()["checksum_failures"] >= before + 6
