"""Plans on their way: building a plan's delta, and the record of each plan until all ranks have answered it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.ipc.messages import JoinRow, StepPlan, StepResult
from serve.router.holding import Holding
from serve.router.ledger import StateLedger
from serve.router.request import Request

Rows = tuple[Request | None, ...]


class PlanBuilder:
    """Collects the changes of one step.

    holding: pages that are given back when the plan has ended, None: there are none.
    """

    def __init__(self, epoch: int, step: int) -> None:
        self.step = step
        self.num_prefill_tokens = 0
        self.holding: Holding | None = None
        self._plan = StepPlan(epoch, step)

    def hold(self, ledger: StateLedger) -> Holding:
        """What this plan is the last to use."""
        if self.holding is None:
            self.holding = ledger.open()
        return self.holding

    def join(self, request: Request, row: int, checkpointed: Sequence[str]) -> None:
        """The request enters `row` with the pages that it holds now; of `checkpointed` groups with the working page."""
        holding, key = request.holding, request.key
        assert holding is not None
        pages = {group: list(ids[:1] if group in checkpointed else ids) for group, ids in holding.pages.items()}
        join = JoinRow(
            row, key.slot, key.generation, request.num_prompt, request.num_known, request.num_scheduled, pages
        )
        join.first_places, join.restores = dict(holding.first_places), dict(holding.restores)
        self._plan.joins.append(join)

    def snapshot(self, request: Request, group: str, page: int) -> None:
        """After the step the request's working page is copied to `page`."""
        assert request.row is not None
        self._plan.snapshots.append((request.row, group, page))

    def chunk(self, row: int, count: int) -> None:
        """The row computes the next `count` of its known tokens."""
        self._plan.chunks.append((row, count))
        self.num_prefill_tokens += count

    def give(self, request: Request, pages: dict[str, list[int]]) -> None:
        """The request's row gets more pages."""
        row = request.row
        assert row is not None
        self._plan.new_pages.extend((row, group, ids) for group, ids in pages.items())

    def build(self, leaves: list[int], paused: list[int]) -> StepPlan:
        """The finished plan."""
        self._plan.leaves = leaves
        self._plan.paused = paused
        return self._plan


@dataclass(slots=True)
class PlanRecord:
    """A plan that was sent. rows: who was in which row when it was made. result: rank 0's answer.

    chunks: who prefills in it, with the known tokens that are computed after it. holding: pages that it is the last to
    use.
    """

    step: int
    rows: Rows
    num_prefill_tokens: int
    num_decode_rows: int
    sent_at: float
    waiting: set[int]
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    holding: Holding | None = None
    result: StepResult | None = None
    compute_s: float = 0.0

    def take(self, result: StepResult) -> None:
        """Note one rank's answer; a repeated one changes nothing."""
        if result.rank not in self.waiting:
            return
        self.waiting.remove(result.rank)
        self.compute_s = max(self.compute_s, result.compute_s)
        if result.rank == 0:
            self.result = result


@dataclass(slots=True)
class Pipeline:
    """Plans in flight, in order. One may run and one may wait behind it."""

    num_ranks: int
    next_step: int = 0
    ended_step: int = -1
    _in_flight: deque[PlanRecord] = field(default_factory=deque)
    _last_end: float = 0.0

    DEPTH = 2

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < self.DEPTH

    def add(
        self,
        rows: Rows,
        num_prefill_tokens: int,
        num_decode_rows: int,
        now: float,
        chunks: Sequence[tuple[Request, int]] = (),
        holding: Holding | None = None,
    ) -> None:
        """The plan `next_step` was sent to all ranks."""
        ranks = set(range(self.num_ranks))
        record = PlanRecord(
            self.next_step, rows, num_prefill_tokens, num_decode_rows, now, ranks, list(chunks), holding
        )
        self._in_flight.append(record)
        self.next_step += 1

    def num_leaving(self, group: str) -> int:
        """Pages of a group that come back with the plans in flight."""
        return sum(len(record.holding.pages[group]) for record in self._in_flight if record.holding is not None)

    def take(self, result: StepResult) -> bool:
        """Note a rank's answer; False when no plan in flight has its step."""
        place = result.step - self.ended_step - 1
        if not 0 <= place < len(self._in_flight):
            return False
        self._in_flight[place].take(result)
        return True

    def pop_ended(self, now: float) -> PlanRecord | None:
        """The oldest plan, once all ranks have answered it."""
        if not self._in_flight or self._in_flight[0].waiting:
            return None
        record = self._in_flight.popleft()
        self.ended_step = record.step
        self._last_end = now
        return record

    def started_at(self) -> float | None:
        """When the oldest plan in flight could begin: it was sent, and the one before it had ended."""
        if not self._in_flight:
            return None
        return max(self._in_flight[0].sent_at, self._last_end)
