"""The rows of the running batch, as the next plan will find them."""

import heapq
from enum import Enum

from serve.router.request import Request
from serve.router.step_plan import Rows


class RowPhase(Enum):
    """What a row waits for. DECODING rows go on by themselves; NEEDY ones need a page first."""

    PREFILLING = "prefilling"
    DECODING = "decoding"
    NEEDY = "needy"


class Batch:
    """Who is in which row and in which phase. A freed row is told to the workers with the next plan."""

    def __init__(self, num_rows: int) -> None:
        self.phases: dict[RowPhase, dict[int, Request]] = {phase: {} for phase in RowPhase}
        self._rows: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows))
        self._leaves: list[int] = []
        self._snapshot: Rows | None = None

    @property
    def decoding(self) -> dict[int, Request]:
        return self.phases[RowPhase.DECODING]

    @property
    def needy(self) -> dict[int, Request]:
        return self.phases[RowPhase.NEEDY]

    @property
    def prefilling(self) -> dict[int, Request]:
        return self.phases[RowPhase.PREFILLING]

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    def __len__(self) -> int:
        return len(self._rows) - len(self._free)

    def running(self) -> list[Request]:
        """All requests in rows, oldest (or most important) first."""
        return sorted((r for r in self._rows if r is not None), key=lambda r: r.sort_key)

    def request(self, row: int) -> Request:
        """Who is in the row; raises when it is empty."""
        request = self._rows[row]
        if request is None:
            raise LookupError(f"row {row} is empty")
        return request

    def snapshot(self) -> Rows:
        """Who is in which row now; the same object until that changes."""
        if self._snapshot is None:
            self._snapshot = tuple(self._rows)
        return self._snapshot

    def join(self, request: Request) -> int:
        """Give the request the lowest free row, prefilling."""
        row = heapq.heappop(self._free)
        self._rows[row] = request
        self._snapshot = None
        request.row = row
        self.prefilling[row] = request
        return row

    def move(self, request: Request, phase: RowPhase) -> None:
        """Put a request's row into a phase."""
        assert request.row is not None
        for rows in self.phases.values():
            rows.pop(request.row, None)
        self.phases[phase][request.row] = request

    def remove(self, request: Request) -> None:
        """Free the request's row; the next plan tells the workers."""
        if request.row is None:
            return
        for rows in self.phases.values():
            rows.pop(request.row, None)
        self._rows[request.row] = None
        self._snapshot = None
        self._leaves.append(request.row)
        heapq.heappush(self._free, request.row)
        request.row = None

    def take_leaves(self) -> list[int]:
        """Rows freed since the last plan."""
        leaves, self._leaves = self._leaves, []
        return leaves
