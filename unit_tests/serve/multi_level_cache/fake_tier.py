"""A secondary tier in a dict, whose transfers end when the test says so."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.multi_level_cache.page_state import PageKey, TierTicket
from serve.multi_level_cache.secondary_tier import (
    LoadRequest,
    SecondaryTier,
    StoreRequest,
    TierCapacity,
    TransferOutcome,
    TransferResult,
)


class FakeTier(SecondaryTier):
    """`finish` ends what is in flight. is_open: accepts stores."""

    name = "disk"

    def __init__(self) -> None:
        self.objects: dict[PageKey, tuple[bytes, np.ndarray, bytes]] = {}  # bytes, checksums, root
        self.loads: list[LoadRequest] = []
        self.stores: list[StoreRequest] = []
        self.results: list[TransferResult] = []
        self.evicted: list[PageKey] = []
        self.is_open = True
        self.cancelled: set[TierTicket] = set()
        self.refused: list[PageKey] = []  # keys of stores that `finish` refused

    def finish(self, outcome: TransferOutcome = TransferOutcome.DONE) -> None:
        if outcome is TransferOutcome.REFUSED:
            self.refused += [store.key for store in self.stores]
        for store in self.stores:
            is_cancelled = store.ticket in self.cancelled
            if outcome is TransferOutcome.DONE and not is_cancelled:
                data = b"".join(view.tobytes() for view in store.views)
                self.objects[store.key] = data, store.checksums, store.root
            self.results.append(TransferResult(store.ticket, TransferOutcome.REFUSED if is_cancelled else outcome))
        for load in self.loads:
            self.results.append(self._load(load, outcome))
        self.stores, self.loads = [], []

    def _load(self, load: LoadRequest, outcome: TransferOutcome) -> TransferResult:
        if outcome is not TransferOutcome.DONE or load.key not in self.objects:
            return TransferResult(load.ticket, TransferOutcome.MISSING if outcome is TransferOutcome.DONE else outcome)
        data, checksums, _ = self.objects[load.key]
        start = 0
        for view in load.views:
            view[:] = np.frombuffer(data[start : start + len(view)], dtype=np.uint8)
            start += len(view)
        return TransferResult(load.ticket, TransferOutcome.DONE, checksums)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [key in self.objects for key in keys]

    def touch(self, keys: Sequence[PageKey]) -> None:
        pass

    def can_accept(self, num_bytes: int) -> bool:
        return self.is_open

    def submit_store(self, request: StoreRequest) -> None:
        self.stores.append(request)

    def submit_load(self, request: LoadRequest) -> None:
        self.loads.append(request)

    def poll_finished(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def poll_evicted(self) -> list[PageKey]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def fileno(self) -> int:
        return 0

    def evict(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def evict_root(self, root: bytes | None) -> None:
        self.cancelled |= {store.ticket for store in self.stores if root in (None, store.root)}
        self.objects = {key: value for key, value in self.objects.items() if root is not None and value[2] != root}

    def capacity(self) -> TierCapacity:
        return TierCapacity(1 << 30, 0, len(self.objects))

    def statistics(self) -> dict[str, Any]:
        return {}

    def tick(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass
