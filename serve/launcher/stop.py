"""The ordered stop: first who lets requests in, last who keeps what they left."""

import logging
import time
from dataclasses import dataclass

from serve.ipc.messages import StopChild
from serve.launcher.child_process import ChildStatus
from serve.launcher.children import Children
from serve.launcher.events import EventLoop
from serve.multi_level_cache.disk_room import CLOSE_DISK_S

# What a process gets to finish after its requests have drained.
GRACE_S = 5.0
# The cache manager: its disk tier writes for up to `CLOSE_DISK_S` what was submitted.
CACHE_GRACE_S = CLOSE_DISK_S + GRACE_S
REAP_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopStage:
    """Children that are stopped together. drain_s: for requests; grace_s: then, to finish."""

    role: str
    drain_s: float = 0.0
    grace_s: float = GRACE_S


def stop_in_order(events: EventLoop, children: Children, drain_s: float) -> None:
    """Stop role by role; a second SIGINT or SIGTERM kills at once what is left. Returns when all are reaped."""
    signals_before = events.num_stops
    for child in children.living():
        if child.status is ChildStatus.STARTING:
            child.kill()  # it does not listen yet, and has nothing to finish
    for stage in (
        StopStage("httpserver", drain_s),
        StopStage("router"),
        StopStage("worker"),
        StopStage("cache", grace_s=CACHE_GRACE_S),
    ):
        for child in children.living(stage.role):
            child.send(StopChild(stage.drain_s))
        deadline = time.monotonic() + stage.drain_s + stage.grace_s
        while children.living(stage.role) and time.monotonic() < deadline and events.num_stops == signals_before:
            events.run_once(min(0.2, deadline - time.monotonic()))
            children.reap()
        if events.num_stops != signals_before:
            logger.warning("stopping at once")
            break
        for child in children.living(stage.role):
            logger.warning("%s does not stop and is killed", child.name)
            child.kill()
    kill_all(events, children)


def kill_all(events: EventLoop, children: Children) -> None:
    """Kill what lives and wait until it is reaped."""
    children.kill()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while children.living() and time.monotonic() < deadline:
        events.run_once(0.2)
        children.reap()
    for child in children.living():
        logger.error("%s (process %d) cannot be killed; the kernel holds it", child.name, child.pid)
