"""What can be done with a running server's cache, over the control plane: for the HTTP routes and for `varve cache`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from serve.cache_report import tier_reports
from serve.ipc.control import ControlClient, ControlError

ROUTER, CACHE = "control-router", "control-cache"
CALL_TIMEOUT_S = 10.0
# The router keeps away from the lower tiers for so long; the manager's part of a flush must end within.
QUIET_S = 30.0
MANAGER_FLUSH_S = 20.0
LEAVE_TIMEOUT_S = 30.0
_POLL_S = 0.02
ENGINE_DOWN = "the engine is down"


class CacheOperationError(Exception):
    """An operation is not done, or only in part; one line for the operator."""


class Ask(Protocol):
    """Calls a method of a process by its control socket. Raises ControlError."""

    def __call__(self, socket: str, method: str, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any: ...


def ask_in(run_dir: Path) -> Ask:
    """Asks the processes of the server with this run directory, each time on a connection of its own."""

    def ask(socket: str, method: str, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        client = ControlClient(run_dir, socket, timeout_s)
        try:
            return client.call(method, **arguments)
        finally:
            client.close()

    return ask


def stats(ask: Ask) -> dict[str, Any]:
    """Reports of the tiers, and the raw statistics of router and cache manager; who is away is told in `away`."""
    found: dict[str, dict[str, Any]] = {"router": {}, "cache": {}}
    away = {}
    for name, socket in (("router", ROUTER), ("cache", CACHE)):
        try:
            found[name] = dict(ask(socket, "statistics"))
        except ControlError as error:
            away[name] = str(error)
    if len(away) == len(found):
        raise CacheOperationError(f"neither router nor cache manager answers: {away['router']}")
    reports = tier_reports(found["router"], found["cache"])
    return {"tiers": [report.as_data() for report in reports], "away": away, **found}


def list_pages(ask: Ask, limit: int, salt: str | None = None) -> list[dict[str, Any]]:
    """Pages of the host, most recently used first; with a salt only those of requests with this `cache_salt`."""
    arguments: dict[str, Any] = {"limit": limit}
    if salt is not None:
        arguments["root"] = _root(ask, salt)
    return list(_must(lambda: ask(CACHE, "ls", **arguments)))


def check(ask: Ask) -> dict[str, list[str]]:
    """Problems in the books of router and cache manager, by part."""
    return {
        "router": list(_must(lambda: ask(ROUTER, "check"))["problems"]),
        "cache": list(_must(lambda: ask(CACHE, "check"))),
    }


def flush(ask: Ask, salt: str | None = None, clock: Callable[[], float] = time.monotonic) -> dict[str, int]:
    """Flush all tiers: once this has returned, no page of before is hit, not even after a restart of the server.

    With a salt, only the pages of requests with this `cache_salt` are dropped. The router uses no lower tier while the
    manager drops pages, so that nothing is brought back in between. Raises CacheOperationError, also when only a part
    was flushed; a repeated flush does the rest.
    """
    root: dict[str, Any] = {} if salt is None else {"root": _root(ask, salt)}
    device = _must(lambda: ask(ROUTER, "flush", quiet_s=QUIET_S, **root))
    if device is None:
        raise CacheOperationError(ENGINE_DOWN)
    try:
        lower = _must(lambda: ask(CACHE, "flush", MANAGER_FLUSH_S, **root), "only the device was flushed")
    finally:
        _open_tiers(ask)
    deadline = clock() + LEAVE_TIMEOUT_S
    while lower["leaving"]:
        if clock() > deadline:
            count = lower["leaving"]
            raise CacheOperationError(f"nothing of before is hit now, but {count} objects are still on disk")
        time.sleep(_POLL_S)
        lower |= _must(lambda: ask(CACHE, "leaving"), "nothing of before is hit now, but some may be on disk")
    return {
        "device_pages": device["num_dropped"],
        "device_pages_in_use": device["num_referenced"],
        "host_objects": lower["dropped"],
        "disk_objects": lower["lower_dropped"],
    }


def _open_tiers(ask: Ask) -> None:
    """A router that does not answer opens them by itself when the quiet has passed."""
    try:
        ask(ROUTER, "open_tiers")
    except ControlError:
        pass


def _root(ask: Ask, salt: str) -> str:
    root = _must(lambda: ask(ROUTER, "root", salt=salt))
    if root is None:
        raise CacheOperationError(ENGINE_DOWN)
    return str(root)


def _must(call: Callable[[], Any], done: str = "") -> Any:
    try:
        return call()
    except ControlError as error:
        raise CacheOperationError(f"{done}: {error}" if done else str(error)) from error
