"""What the next step does: a pure function from a frozen view to a schedule. No I/O, no clock, no state.

Rows that merely decode are not in the view one by one: they go on by themselves. The view has only what needs a
decision: rows that need a page, rows that are prefilling, requests that wait. So a steady decode step costs nothing
here, whatever the size of the batch.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits that hold for a whole run."""

    batch_max_tokens: int
    chunked_prefill_size: int
    page_size: int


@dataclass(frozen=True, slots=True)
class PageNeed:
    """A decoding row that cannot go on without `num_pages` more pages in every group that grows."""

    row: int
    num_pages: int = 1


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row whose known tokens [num_scheduled, num_known) are still to be computed.

    stop: where the next chunk ends at the latest, None: at `num_known`. ends: by group with a window, the place behind
    its last page; further ones are taken for a chunk.
    """

    row: int
    num_scheduled: int
    num_known: int
    stop: int | None = None
    ends: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Victim:
    """A running row that may be preempted; `num_pages` by group come back when it is."""

    row: int
    num_pages: dict[str, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request, matched with the index.

    new_pages: by group, pages that it takes when it joins, beyond the match. growth: more that it is expected to ask
    for. idle_hits: matched pages that are idle and stop being room. wanted_name: name of its next missing page, None
    when it could not use that page. first_name: name of the first page that it would complete, None when it completes
    none. held_s, hold_limit_s: how long it waits for another's prefill, and may wait. stop: where its first chunk ends
    at the latest, None: at `num_known`.
    """

    slot: int
    num_cached: int
    num_known: int
    new_pages: Mapping[str, int]
    growth: Mapping[str, int]
    idle_hits: Mapping[str, int]
    wanted_name: bytes | None = None
    first_name: bytes | None = None
    held_s: float = 0.0
    hold_limit_s: float = 0.0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """All that a schedule depends on.

    needs, prefilling: oldest request first. candidates: in the order of the queue. victims: in the order of
    preemption, without the oldest running request. room: pages by group that can be had now. expected_growth: pages by
    group that running requests are expected to ask for. computing: names of the pages that prefilling rows compute
    next. pages_coming: a preempted or ended request gives pages back as soon as its plans have ended. leaving: by
    group, pages that rows have left behind and that come back with the plans in flight. growing: groups that decoding
    rows need pages of, None: all.
    """

    num_decoding: int
    free_rows: int
    room: dict[str, int]
    expected_growth: Mapping[str, int] = field(default_factory=dict)
    needs: tuple[PageNeed, ...] = ()
    prefilling: tuple[PrefillRow, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    victims: tuple[Victim, ...] = ()
    computing: Set[bytes] = frozenset()
    pages_coming: bool = False
    leaving: Mapping[str, int] = field(default_factory=dict)
    growing: Set[str] | None = None


class Blocked(Enum):
    """Why the first request that was not admitted still waits."""

    PAGES = "pages"
    ROWS = "rows"
    BUDGET = "budget"


@dataclass(slots=True)
class Schedule:
    """Decisions for one step.

    grants: (row, pages in every group that grows). chunks: (row, count) of rows that prefill already. admissions:
    (slot, count) of requests that join with a first chunk. paused: decoding rows that sit this step out. preemptions:
    rows that leave. held: slots that wait for another's prefill. stalled: prefilling rows that lack a page of a window.
    """

    grants: list[tuple[int, int]] = field(default_factory=list)
    paused: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    admissions: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    stalled: list[int] = field(default_factory=list)
    blocked: Blocked | None = None


class Scheduler:
    """Continuous batching: decode rows first, then prefill chunks, then new requests, under one token budget."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits

    def schedule(self, view: SchedulerView) -> Schedule:
        """Decide one step."""
        schedule = Schedule()
        room = dict(view.room)
        self._grant_pages(view, schedule, room)
        num_decoding = view.num_decoding + len(schedule.grants)
        budget = self.limits.batch_max_tokens - num_decoding
        self._continue_prefills(view, schedule, room, budget)
        budget -= sum(count for _, count in schedule.chunks)
        if not schedule.paused and not schedule.preemptions and not schedule.stalled:
            self._admit(view, schedule, room, budget)
        return schedule

    def _grant_pages(self, view: SchedulerView, schedule: Schedule, room: dict[str, int]) -> None:
        growing = room.keys() if view.growing is None else view.growing
        missing = 0
        for need in view.needs:
            if not missing and all(room[group] >= need.num_pages for group in growing):
                schedule.grants.append((need.row, need.num_pages))
                for group in growing:
                    room[group] -= need.num_pages
            else:
                schedule.paused.append(need.row)
                missing += need.num_pages
        if missing:
            self._make_room(view, schedule, {group: missing - room[group] for group in growing})

    def _make_room(self, view: SchedulerView, schedule: Schedule, missing: dict[str, int]) -> None:
        """Preempt, unless what is missing comes back anyway."""
        if view.pages_coming or all(count <= view.leaving.get(group, 0) for group, count in missing.items()):
            return
        self._preempt(view, schedule, missing)

    @staticmethod
    def _preempt(view: SchedulerView, schedule: Schedule, missing: dict[str, int]) -> None:
        """Choose victims until what they give back, or no longer need, covers what is missing."""
        wanted = {need.row: need.num_pages for need in view.needs}
        for victim in view.victims:
            if all(count <= 0 for count in missing.values()):
                return
            if victim.row in schedule.preemptions:
                continue
            schedule.preemptions.append(victim.row)
            spared = 0
            if victim.row in schedule.paused:
                schedule.paused.remove(victim.row)
                spared = wanted[victim.row]
            for group in missing:
                missing[group] -= victim.num_pages[group] + spared

    def _continue_prefills(self, view: SchedulerView, schedule: Schedule, room: dict[str, int], budget: int) -> None:
        missing: dict[str, int] = {}
        for row in view.prefilling:
            if budget <= 0:
                break
            if row.row in schedule.preemptions:
                continue
            count = self._chunk(row.num_scheduled, row.num_known if row.stop is None else row.stop, budget)
            if row.ends:
                count = self._take_window_pages(row, count, room)
            if count <= 0:
                schedule.stalled.append(row.row)
                missing.update((group, 1) for group in row.ends if room[group] <= 0)
                break  # nobody younger takes what it waits for
            schedule.chunks.append((row.row, count))
            budget -= count
        if missing:
            self._make_room(view, schedule, missing)
            schedule.chunks = [chunk for chunk in schedule.chunks if chunk[0] not in schedule.preemptions]

    def _take_window_pages(self, row: PrefillRow, count: int, room: dict[str, int]) -> int:
        """As much of a chunk of `count` tokens as the room has pages for, which are taken from it."""
        size = self.limits.page_size
        for group, end in row.ends.items():
            count = min(count, (end + room[group]) * size - row.num_scheduled)
        for group, end in row.ends.items():
            room[group] -= max(0, -(-(row.num_scheduled + count) // size) - end)
        return count

    def _chunk(self, start: int, end: int, budget: int) -> int:
        """Tokens of the next chunk; one that is not the last ends at a page boundary when it can."""
        count = min(end - start, self.limits.chunked_prefill_size, budget)
        if start + count < end:
            aligned = (start + count) // self.limits.page_size * self.limits.page_size - start
            count = aligned if aligned > 0 else count
        return count

    def _admit(self, view: SchedulerView, schedule: Schedule, room: dict[str, int], budget: int) -> None:
        computing = set(view.computing)
        growth = dict(view.expected_growth)
        free_rows = view.free_rows
        for candidate in view.candidates:
            if candidate.wanted_name in computing and candidate.held_s < candidate.hold_limit_s:
                schedule.held.append(candidate.slot)
                continue
            schedule.blocked = self._blocked(candidate, room, growth, free_rows, budget)
            if schedule.blocked is not None:
                return
            end = candidate.num_known if candidate.stop is None else candidate.stop
            count = self._chunk(candidate.num_cached, end, budget)
            schedule.admissions.append((candidate.slot, count))
            budget -= count
            free_rows -= 1
            for group in room:
                growth[group] = growth.get(group, 0) + candidate.growth[group]
                room[group] -= candidate.new_pages[group] + candidate.idle_hits[group]
            if candidate.first_name is not None:
                computing.add(candidate.first_name)

    @staticmethod
    def _blocked(
        candidate: Candidate, room: dict[str, int], growth: Mapping[str, int], free_rows: int, budget: int
    ) -> Blocked | None:
        if free_rows <= 0:
            return Blocked.ROWS
        if budget <= 0:
            return Blocked.BUDGET
        for group, free in room.items():
            need = candidate.new_pages[group] + candidate.idle_hits[group]
            if need + candidate.growth[group] + growth.get(group, 0) > free:
                return Blocked.PAGES
        return None
