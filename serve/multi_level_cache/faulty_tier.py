"""A secondary tier with faults on purpose, around a real one. Still one result a ticket, but for those that `hang`."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from serve.multi_level_cache.fault_injector import FaultAction, FaultInjector
from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import (
    LoadRequest,
    SecondaryTier,
    StoreRequest,
    TierCapacity,
    TransferOutcome,
    TransferResult,
)

_REFUSED_BY = {FaultAction.FAIL: TransferOutcome.FAILED, FaultAction.DROP: TransferOutcome.MISSING}


class FaultyTier(SecondaryTier):
    """Sites are NAME.read for loads and NAME.write for stores.

    fail and drop end the ticket at once, as FAILED and MISSING; delay and hang hold its result back; bitflip damages
    what a load brought, behind the tier's own check.
    """

    def __init__(
        self, tier: SecondaryTier, injector: FaultInjector, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = tier.name
        self._tier = tier
        self._injector = injector
        self._clock = clock
        self._early: list[TransferResult] = []
        self._loads: set[TierTicket] = set()
        self._given: list[str] = []  # what the last poll brought, as the kill points call it
        self._flips: dict[TierTicket, LoadRequest] = {}
        self._delays: dict[TierTicket, float | None] = {}  # None: hangs
        self._held: list[tuple[float | None, TransferResult]] = []

    def submit_store(self, request: StoreRequest) -> None:
        if self._decide("write", request.ticket) is None:
            self._tier.submit_store(request)

    def submit_load(self, request: LoadRequest) -> None:
        self._loads.add(request.ticket)
        action = self._decide("read", request.ticket)
        if action is FaultAction.BITFLIP:
            self._flips[request.ticket] = request
        if action is None or action is FaultAction.BITFLIP:
            self._tier.submit_load(request)

    def _decide(self, operation: str, ticket: TierTicket) -> FaultAction | None:
        """The fault that stands in for the transfer or goes with it; None when the transfer is to be tried as it is."""
        rule = self._injector.decide(f"{self.name}.{operation}")
        if rule is None:
            return None
        if rule.action in _REFUSED_BY:
            self._early.append(TransferResult(ticket, _REFUSED_BY[rule.action]))
            return rule.action
        if rule.action in (FaultAction.DELAY, FaultAction.HANG):
            self._delays[ticket] = rule.seconds if rule.action is FaultAction.DELAY else None
            return None
        return rule.action if operation == "read" else None

    def poll_finished(self) -> list[TransferResult]:
        now = self._clock()
        self._reach("after")
        results, self._early = self._early, []
        for result in self._tier.poll_finished():
            request = self._flips.pop(result.ticket, None)
            if request is not None:
                self._injector.flip_bit(request.views[0])
            if result.ticket in self._delays:
                delay = self._delays.pop(result.ticket)
                self._held.append((now + delay if delay is not None else None, result))
            else:
                results.append(result)
        results += [result for due, result in self._held if due is not None and due <= now]
        self._held = [(due, result) for due, result in self._held if due is None or due > now]
        for result in results:
            kind = "promotion" if result.ticket in self._loads else "durable"
            self._loads.discard(result.ticket)
            if result.outcome is TransferOutcome.DONE:
                self._given.append(kind)
        self._reach("before")
        return results

    def _reach(self, when: str) -> None:
        """Kill points before and after the manager takes results: after it pages are READY, or DURABLE."""
        for kind in self._given:
            self._injector.reach(f"{self.name}.{when}_{kind}")
        if when == "after":
            self._given.clear()

    def release(self) -> None:
        """Ends all hangs and delays."""
        self._held = [(self._clock(), result) for _, result in self._held]

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return self._tier.contains(keys)

    def touch(self, keys: Sequence[PageKey]) -> None:
        self._tier.touch(keys)

    def can_accept(self, num_bytes: int) -> bool:
        return self._tier.can_accept(num_bytes)

    def poll_evicted(self) -> list[PageKey]:
        return self._tier.poll_evicted()

    def fileno(self) -> int:
        return self._tier.fileno()

    def evict(self, keys: Sequence[PageKey]) -> None:
        self._tier.evict(keys)

    def evict_root(self, root: bytes | None) -> None:
        self._tier.evict_root(root)

    def capacity(self) -> TierCapacity:
        return self._tier.capacity()

    def statistics(self) -> dict[str, Any]:
        return {**self._tier.statistics(), "faults": dict(self._injector.counts), "sites": self._injector.passed()}

    def check_integrity(self) -> list[str]:
        return self._tier.check_integrity()

    def num_leaving(self) -> int:
        return self._tier.num_leaving()

    def tick(self) -> None:
        self._tier.tick()

    def close(self, timeout_s: float) -> None:
        self.release()
        self._tier.close(timeout_s)
