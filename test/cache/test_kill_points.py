"""A process ends at a named moment under 16 streams; no token is wrong, no page stuck and no slot lost afterwards."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_engine import CacheServer, Load, make_trees

from serve.ipc.control import ControlError
from serve.launcher.restart_policy import HEALTHY_S

DEADLINE_S = 100.0  # of a restart on a machine that does much else; it takes a few seconds
NO_FAULT = "host.copy_in:delay=0:n=1"
ROLES = {"worker": "worker-0", "manager": "cache"}
MANAGER_POINTS = [
    f"manager.{when}_{what}"
    for what in ("claim", "publish", "acquire", "begin", "answer")
    for when in ("before", "after")
]
WORKER_POINTS = [f"worker.{when}_{what}" for what in ("copy_out", "copy_in", "answer") for when in ("before", "after")]
# The launcher gives up on what dies five times soon after its start, so the two take turns, and some live longer.
POINTS = [
    point for pair in zip(WORKER_POINTS, MANAGER_POINTS[: len(WORKER_POINTS)], strict=True) for point in pair
] + MANAGER_POINTS[len(WORKER_POINTS) :]


FEW = {"worker.before_copy_out", "manager.before_publish", "manager.after_acquire", "worker.after_answer"}


@pytest.fixture(scope="module")
def served(start_tiers: Callable[..., Any]) -> Iterator[CacheServer]:
    with start_tiers("--max_total_token_num", "1024", "--fault_inject", NO_FAULT, host_pages=200) as server:
        yield server


def empty_device(server: CacheServer) -> None:
    """So that there is something to load. The router may be going down with its engine group."""
    with contextlib.suppress(ControlError):
        server.call("router", "flush")


def wait_for_age(server: CacheServer, role: str) -> None:
    process = server.server.child(role)
    time.sleep(max(0.0, process.create_time() + HEALTHY_S + 4.0 - time.time()))


def wait_for_arena(server: CacheServer, deadline: float) -> None:
    """A new manager gives no slot away before it knows which the worker uses, and grows the arena beside all else."""
    while True:
        with contextlib.suppress(ControlError):  # there may be none yet: requests do without
            slots = server.cache_statistics()["slots"]
            if slots["backed"] == slots["total"]:
                return
        assert time.monotonic() < deadline, "the arena does not grow"
        time.sleep(0.02)


def marked(point: str) -> Any:
    return point if point in FEW else pytest.param(point, marks=pytest.mark.slow)


@pytest.mark.parametrize("point", [marked(point) for point in POINTS])
def test_a_death_at(served: CacheServer, point: str):
    owner = point.partition(".")[0]
    role = "worker" if owner == "worker" else "cache"
    prompts = make_trees(6, 4, point)
    served.server.wait_until_ready()
    if POINTS.index(point) % 4 < 2:
        wait_for_age(served, role)
    victim = served.server.child(role)
    with Load(served, prompts) as load:
        served.call(ROLES[owner], "inject", faults=f"{point}:kill:n=7")
        deadline = time.monotonic() + DEADLINE_S
        while victim.is_running() and victim.status() != "zombie":
            assert time.monotonic() < deadline, "the point was not passed seven times"
            if role == "worker" or "acquire" in point:
                empty_device(served)
            time.sleep(0.02)
        served.server.wait_until_ready()
        num_right = load.num_right
        while load.num_right < num_right + 16:
            assert time.monotonic() < deadline + DEADLINE_S, "it does not serve again"
            time.sleep(0.02)
    assert f"killed at {point}" in served.server.log_path.read_text()
    assert load.wrong == []
    wait_for_arena(served, deadline + DEADLINE_S)
    cache = served.check_clean()
    assert cache["slots"]["free"] + cache["objects"]["content"].get("ready", 0) == cache["slots"]["total"]
