"""Measures at start what moving pages costs, by the very path that jobs take: copies, checksums and all."""

from serve.model_infer.host_pages import RankPages
from serve.model_infer.page_mover import PageMover
from serve.model_infer.page_runs import PageObject
from serve.model_infer.staging_setup import make_movers
from serve.model_infer.transfer import Direction, Transfer
from serve.multi_level_cache.host_arena import ArenaShape, HostArena
from serve.types import JobId, JobResult

_PROBE_BYTES = 16 << 20
_MAX_PAGES = 16
_ROUNDS = 3
_PROBE_JOB = JobId(0, 0)


class ProbeError(Exception):
    """Pages did not come back as they went; one line."""


def measure_copies(groups: dict[str, RankPages], slot_bytes: int) -> dict[str, float]:
    """Bytes of *whole* objects a second that this rank would keep up with, by direction ("load", "store").

    Takes a few milliseconds and an arena of its own. Uses the first pages of the largest group, which nothing refers to
    yet, and leaves their bytes as they are. Raises ProbeError.
    """
    pages = max(groups.values(), key=lambda each: each.format.object_bytes)
    count = max(1, min(_MAX_PAGES, pages.pool.shape[0], _PROBE_BYTES // pages.pool.shape[1]))
    num_slots = count * pages.slots_per_object
    arena = HostArena.create(ArenaShape(num_slots, slot_bytes, len(pages.format.unit_bytes)))
    movers = make_movers(arena, pages.pool.device)
    try:
        _measure(movers, pages, count)  # compiles, and touches memory for the first time
        return _measure(movers, pages, count)
    finally:
        for mover in movers.values():
            mover.engine.close()
        arena.close()


def _measure(movers: dict[Direction, PageMover], pages: RankPages, count: int) -> dict[str, float]:
    """The mean of a few rounds, each a store and then a load of what was stored."""
    step = pages.slots_per_object
    objects = [PageObject(page, tuple(range(page * step, (page + 1) * step)), (0,) * step) for page in range(count)]
    seconds = dict.fromkeys(Direction, 0.0)
    for _ in range(_ROUNDS):
        for direction in (Direction.STORE, Direction.LOAD):
            mover = movers[direction]
            transfer = Transfer(_PROBE_JOB, direction, pages, objects, fence=mover.engine.make_fence())
            outcome = mover.run(transfer)
            if outcome.result is not JobResult.DONE and pages.stores.num_bytes == pages.loads.num_bytes:
                raise ProbeError(f"pages did not come back from CPU memory as they went: {outcome.detail}")
            seconds[direction] += outcome.seconds
    num_bytes = pages.format.object_bytes * count * _ROUNDS
    return {direction.value: num_bytes / max(time, 1e-9) for direction, time in seconds.items()}
