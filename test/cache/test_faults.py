"""Faults on purpose under 16 streams: every request ends, and its text is that of a run without faults."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_engine import CacheServer, Load, Tokens, make_prompt, make_trees

NUM_STREAMS = 16
POOL = ("--max_total_token_num", "2048")
HOST_PAGES = 128


def run_rounds(server: CacheServer, prompts: list[Tokens], num_rounds: int) -> None:
    """All prompts by 16 streams, again and again, the device emptied in between."""
    for _ in range(num_rounds):
        server.check_all(prompts, NUM_STREAMS)
        server.call("router", "flush")


def spec(site: str, *faults: str) -> list[str]:
    return [f"{site}:{fault}" for fault in faults]


def test_faults_of_every_kind_at_every_site(start_tiers: Callable[..., Any], tmp_path: Any):
    """The working set is three times the host, so that all sites have work all the time."""
    kinds = ("delay=0.05:p=0.1", "fail:p=0.1", "drop:p=0.1", "bitflip:p=0.2")
    rules = [
        rule for site in ("host.copy_in", "host.copy_out", "disk.read", "disk.write") for rule in spec(site, *kinds)
    ]
    prompts = make_trees(12, 6, "faults", 4 * 16)
    flags = (*POOL, "--fault_inject", ",".join(rules))
    with start_tiers(*flags, host_pages=HOST_PAGES, disk=tmp_path / "pages") as server:
        run_rounds(server, prompts, 5)
        with Load(server, prompts) as load:
            for number in range(3):
                server.check(make_prompt(1000, ("filler", number)), 1)
                server.call("router", "flush")
        statistics = server.check_clean()
    assert load.wrong == []
    assert load.num_right
    assert not load.num_errors
    assert statistics["checksum_failures"] > 0, statistics
    faults = statistics["lower_tier"]["faults"]
    for kind in ("delay", "fail", "drop"):
        assert faults.get(f"disk.read:{kind}"), faults
        assert faults.get(f"disk.write:{kind}"), faults


@pytest.mark.parametrize(
    "rules",
    [
        "host.copy_in:hang:n=30,disk.write:hang:n=20,disk.write:hang:n=21",
        "host.copy_out:hang:n=60,disk.read:hang:p=0.2",
    ],
)
def test_hangs(start_tiers: Callable[..., Any], tmp_path: Any, rules: str):
    prompts = make_trees(12, 6, "hangs", 4 * 16)
    flags = (*POOL, "--fault_inject", rules)
    with start_tiers(*flags, host_pages=HOST_PAGES, disk=tmp_path / "pages") as server:
        run_rounds(server, prompts, 4)
        server.check_clean(hung_jobs=1)


@pytest.mark.parametrize("site", ["host.copy_in", "host.copy_out"])
def test_a_flipped_bit_is_always_caught(start_tiers: Callable[..., Any], site: str):
    """Every page that is copied has one: nothing is hit, and each is counted."""
    prompts = [make_prompt(16 * 6 + 5, ("flipped", number)) for number in range(16)]
    with start_tiers("--fault_inject", f"{site}:bitflip") as server:
        server.check_all(prompts, NUM_STREAMS)
        server.flush_device()
        answers = server.check_all(prompts, NUM_STREAMS)
        assert all(answer.host == 0 for answer in answers)
        assert server.check_clean()["checksum_failures"] >= 6
