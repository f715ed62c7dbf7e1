"""What is asked of whom, in which order, and what is told when somebody does not answer."""

from collections.abc import Callable
from typing import Any

import pytest

from serve import cache_operations
from serve.cache_operations import CACHE, QUIET_S, ROUTER, CacheOperationError
from serve.ipc.control import ControlError


class Processes:
    """Answers by (socket, method): a value, a function of the arguments, or an exception."""

    def __init__(self, **changes: Any) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {
            "router.flush": {"num_dropped": 5, "num_referenced": 1},
            "router.open_tiers": {},
            "router.root": "ab",
            "router.check": {"problems": ["odd"]},
            "router.statistics": {"tiers": {"num_hits_device": 2}, "pages": {}},
            "cache.flush": {"dropped": 4, "lower_dropped": 3, "leaving": 2},
            "cache.leaving": {"leaving": 0},
            "cache.check": [],
            "cache.ls": [],
            "cache.statistics": {},
        }
        self.answers.update({name.replace("_", ".", 1): value for name, value in changes.items()})

    def __call__(self, socket: str, method: str, timeout_s: float = 0.0, **arguments: Any) -> Any:
        part = {ROUTER: "router", CACHE: "cache"}[socket]
        self.calls.append((part, method, arguments))
        answer = self.answers[f"{part}.{method}"]
        if isinstance(answer, Exception):
            raise answer
        return answer(**arguments) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]


GONE = ControlError("control-x does not answer")


def test_a_flush_shuts_the_way_down_first_and_opens_it_at_the_end() -> None:
    processes = Processes()
    found = cache_operations.flush(processes)
    assert found == {"device_pages": 5, "device_pages_in_use": 1, "host_objects": 4, "disk_objects": 3}
    assert processes.calls == [
        ("router", "flush", {"quiet_s": QUIET_S}),
        ("cache", "flush", {}),
        ("router", "open_tiers", {}),
        ("cache", "leaving", {}),
    ]


def test_a_salt_becomes_its_root() -> None:
    processes = Processes()
    cache_operations.flush(processes, "tenant")
    cache_operations.list_pages(processes, 5, "tenant")
    assert ("router", "root", {"salt": "tenant"}) in processes.calls
    assert ("router", "flush", {"quiet_s": QUIET_S, "root": "ab"}) in processes.calls
    assert ("cache", "flush", {"root": "ab"}) in processes.calls
    assert ("cache", "ls", {"limit": 5, "root": "ab"}) in processes.calls


def test_a_flush_that_is_cut_short_says_how_far_it_came() -> None:
    processes = Processes(router_flush=GONE)
    with pytest.raises(CacheOperationError, match="control-x does not answer"):
        cache_operations.flush(processes)
    assert len(processes.calls) == 1
    processes = Processes(cache_flush=GONE)
    with pytest.raises(CacheOperationError, match="only the device was flushed"):
        cache_operations.flush(processes)
    assert processes.calls[-1][1] == "open_tiers"
    with pytest.raises(CacheOperationError, match="some may be on disk"):
        cache_operations.flush(Processes(cache_leaving=GONE, router_open_tiers=GONE))
    with pytest.raises(CacheOperationError, match="the engine is down"):
        cache_operations.flush(Processes(router_root=None), "tenant")
    processes = Processes(router_flush=None)
    with pytest.raises(CacheOperationError, match="the engine is down"):
        cache_operations.flush(processes)
    assert len(processes.calls) == 1, "a router that comes up may be loading pages by now"


def test_objects_that_stay_on_disk_are_told() -> None:
    times = iter([0.0, 0.0, 1000.0])
    processes = Processes(cache_leaving={"leaving": 2})
    with pytest.raises(CacheOperationError, match="2 objects are still on disk"):
        cache_operations.flush(processes, clock=lambda: next(times))


def test_statistics_do_without_one_of_the_two() -> None:
    found = cache_operations.stats(Processes(cache_statistics=GONE))
    assert [tier["tier"] for tier in found["tiers"]] == ["device"]
    assert found["away"] == {"cache": str(GONE)}
    with pytest.raises(CacheOperationError, match="neither"):
        cache_operations.stats(Processes(cache_statistics=GONE, router_statistics=GONE))


def test_a_check_tells_problems_by_part() -> None:
    assert cache_operations.check(Processes()) == {"router": ["odd"], "cache": []}
