"""Decisions of the scheduler, one view at a time."""

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.router.scheduler import (
    Blocked,
    Candidate,
    PageNeed,
    PrefillRow,
    Schedule,
    Scheduler,
    SchedulerLimits,
    SchedulerView,
    Victim,
)

PAGE = 16
LIMITS = SchedulerLimits(batch_max_tokens=64, chunked_prefill_size=32, page_size=PAGE)


def schedule(limits: SchedulerLimits = LIMITS, **fields) -> Schedule:
    values = {"num_decoding": 0, "free_rows": 8, "room": {"full": 100}, **fields}
    values["expected_growth"] = in_all(values["room"], values.get("expected_growth", 0))
    return Scheduler(limits).schedule(SchedulerView(**values))


def in_all(groups: Iterable[str], count: int | dict[str, int]) -> dict[str, int]:
    """A number for each group: its own, or one for all."""
    return count if isinstance(count, dict) else dict.fromkeys(groups, count)


def candidate(slot: int = 0, num_known: int = 10, **fields) -> Candidate:
    values = {"num_cached": 0, "new_pages": -(-num_known // PAGE), "growth": 0, "idle_hits": {"full": 0}, **fields}
    for field in ("new_pages", "growth"):
        values[field] = in_all(values["idle_hits"], values[field])
    return Candidate(slot=slot, num_known=num_known, **values)


def test_decode_rows_come_first_and_prefills_share_the_rest():
    result = schedule(num_decoding=40, prefilling=(PrefillRow(1, 0, 100), PrefillRow(2, 0, 100)))
    assert result.chunks == [(1, 16), (2, 8)]  # 24 tokens are left; the first chunk ends at a page boundary


def test_a_chunk_is_at_most_the_chunk_size_and_the_last_one_ends_where_the_prompt_does():
    assert schedule(prefilling=(PrefillRow(0, 0, 100),)).chunks == [(0, 32)]
    assert schedule(prefilling=(PrefillRow(0, 96, 100),)).chunks == [(0, 4)]


def test_a_chunk_that_cannot_reach_a_page_boundary_goes_on_all_the_same():
    assert schedule(num_decoding=60, prefilling=(PrefillRow(0, 0, 100),)).chunks == [(0, 4)]


def test_requests_are_admitted_in_order_until_the_budget_is_spent():
    result = schedule(candidates=tuple(candidate(slot, 30) for slot in range(4)))
    assert result.admissions == [(0, 30), (1, 30), (2, 4)]
    assert result.blocked is Blocked.BUDGET


def test_no_more_are_admitted_than_there_are_rows():
    result = schedule(free_rows=1, candidates=(candidate(0), candidate(1)))
    assert result.admissions == [(0, 10)]
    assert result.blocked is Blocked.ROWS


def test_admission_counts_what_everybody_is_expected_to_need():
    waiting = (candidate(0, 16, growth=2), candidate(1, 16))
    assert len(schedule(room={"full": 8}, expected_growth=4, candidates=waiting).admissions) == 2
    assert len(schedule(room={"full": 7}, expected_growth=4, candidates=waiting).admissions) == 1
    assert schedule(room={"full": 6}, expected_growth=4, candidates=waiting).blocked is Blocked.PAGES


def test_matched_idle_pages_are_no_room():
    waiting = (candidate(0, 64, num_cached=48, new_pages=1, idle_hits={"full": 3}),)
    assert schedule(room={"full": 4}, candidates=waiting).admissions == [(0, 16)]
    assert schedule(room={"full": 3}, candidates=waiting).blocked is Blocked.PAGES


def test_the_smallest_group_decides():
    waiting = (candidate(0, 64, idle_hits={"full": 0, "draft": 0}),)
    assert schedule(room={"full": 9, "draft": 3}, candidates=waiting).blocked is Blocked.PAGES


def test_nobody_passes_a_request_that_waits_for_pages():
    result = schedule(room={"full": 2}, candidates=(candidate(0, 100), candidate(1, 10)))
    assert result.admissions == []


def test_equal_prompts_in_one_step_wait_for_the_first():
    waiting = tuple(candidate(slot, 30, wanted_name=b"n", first_name=b"n", hold_limit_s=1.0) for slot in range(3))
    result = schedule(candidates=waiting)
    assert result.admissions == [(0, 30)]
    assert result.held == [1, 2]


def test_a_held_request_lets_others_pass_and_is_freed_by_its_limit():
    held = candidate(0, 30, wanted_name=b"n", first_name=b"n", held_s=0.5, hold_limit_s=1.0)
    other = candidate(1, 10)
    result = schedule(computing=frozenset({b"n"}), candidates=(held, other))
    assert (result.held, result.admissions) == ([0], [(1, 10)])
    overdue = dataclasses.replace(held, held_s=1.0)
    assert schedule(computing=frozenset({b"n"}), candidates=(overdue,)).admissions == [(0, 30)]
    assert schedule(candidates=(held,)).admissions == [(0, 30)]


def test_pages_go_to_the_oldest_first_and_the_rest_pause():
    result = schedule(room={"full": 1}, needs=(PageNeed(3), PageNeed(1)), pages_coming=True, candidates=(candidate(0),))
    assert (result.grants, result.paused, result.preemptions) == ([(3, 1)], [1], [])
    assert result.admissions == []


def test_the_youngest_is_preempted_when_no_pages_are_coming():
    victims = (Victim(7, {"full": 2}), Victim(6, {"full": 2}))
    result = schedule(room={"full": 0}, needs=(PageNeed(1), PageNeed(2)), victims=victims)
    assert result.preemptions == [7]
    assert result.paused == [1, 2]


def test_a_victim_that_needs_a_page_needs_it_no_longer():
    victims = (Victim(2, {"full": 0}), Victim(1, {"full": 5}))
    result = schedule(room={"full": 1}, needs=(PageNeed(0), PageNeed(2)), victims=victims)
    assert (result.grants, result.preemptions, result.paused) == ([(0, 1)], [2], [])


def test_a_preempted_row_gets_no_chunk_and_nobody_takes_its_place():
    result = schedule(
        room={"full": 0},
        needs=(PageNeed(0),),
        victims=(Victim(5, {"full": 9}),),
        prefilling=(PrefillRow(5, 0, 50),),
        candidates=(candidate(0),),
    )
    assert (result.preemptions, result.chunks, result.admissions) == ([5], [], [])


@given(
    num_decoding=st.integers(0, 64),
    prefilling=st.lists(st.tuples(st.integers(0, 90), st.integers(91, 300)), max_size=4),
    known=st.lists(st.integers(1, 200), max_size=6),
    room=st.integers(0, 30),
)
def test_budget_room_and_rows_are_never_exceeded(num_decoding, prefilling, known, room):
    view = SchedulerView(
        num_decoding=num_decoding,
        free_rows=3,
        room={"full": room},
        prefilling=tuple(PrefillRow(row, start, end) for row, (start, end) in enumerate(prefilling)),
        candidates=tuple(candidate(slot, tokens) for slot, tokens in enumerate(known)),
    )
    result = Scheduler(LIMITS).schedule(view)
    counts = [count for _, count in result.chunks + result.admissions]
    assert all(0 < count <= 32 for count in counts)
    assert num_decoding + sum(counts) <= 64
    assert len(result.admissions) <= 3
    assert sum(-(-known[slot] // PAGE) for slot, _ in result.admissions) <= room


def test_a_schedule_depends_on_its_view_alone():
    view = SchedulerView(0, 8, {"full": 100}, candidates=(candidate(0), candidate(1)))
    scheduler = Scheduler(LIMITS)
    assert scheduler.schedule(view) == scheduler.schedule(view)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.free_rows = 3


# --- several groups ---


def test_only_groups_that_grow_are_asked_for_pages_of_decoding_rows():
    room = {"full": 2, "window": 1, "state": 0}
    result = schedule(room=room, needs=(PageNeed(1), PageNeed(2)), growing={"full", "window"}, pages_coming=True)
    assert (result.grants, result.paused) == ([(1, 1)], [2])


def test_a_victim_must_give_back_what_is_missing():
    victims = (Victim(7, {"full": 5, "window": 0}), Victim(6, {"full": 0, "window": 1}))
    result = schedule(room={"full": 3, "window": 0}, needs=(PageNeed(1),), victims=victims)
    assert result.preemptions == [7, 6]


def test_window_pages_that_plans_in_flight_give_back_are_waited_for():
    victims = (Victim(7, {"full": 5, "window": 5}),)
    fields = {"room": {"full": 3, "window": 0}, "needs": (PageNeed(1),), "victims": victims}
    assert schedule(**fields, leaving={"window": 1}).preemptions == []
    assert schedule(**fields, leaving={"full": 1}).preemptions == [7]


def test_a_chunk_ends_where_a_checkpoint_is_due():
    assert schedule(prefilling=(PrefillRow(0, 0, 100, stop=16),)).chunks == [(0, 16)]
    assert schedule(prefilling=(PrefillRow(0, 16, 100, stop=96),)).chunks == [(0, 32)]
    assert schedule(candidates=(candidate(0, 30, stop=16),)).admissions == [(0, 16)]


def test_a_chunk_is_as_long_as_there_are_window_pages():
    row = PrefillRow(0, 16, 100, ends={"window": 1})
    assert schedule(room={"full": 9, "window": 9}, prefilling=(row,)).chunks == [(0, 32)]
    assert schedule(room={"full": 9, "window": 1}, prefilling=(row,)).chunks == [(0, 16)]
    assert schedule(room={"full": 0, "window": 0}, prefilling=(PrefillRow(0, 16, 20, ends={"window": 2}),)).chunks


def test_a_row_without_window_pages_stalls_those_behind_it_and_preempts_the_youngest():
    rows = (PrefillRow(0, 16, 100, ends={"window": 1}), PrefillRow(1, 0, 32, ends={"window": 2}))
    victims = (Victim(1, {"full": 2, "window": 2}),)
    fields = {"room": {"full": 9, "window": 0}, "prefilling": rows, "victims": victims, "candidates": (candidate(3),)}
    fields["candidates"] = (candidate(3, idle_hits={"full": 0, "window": 0}),)
    result = schedule(**fields)
    assert (result.stalled, result.preemptions, result.chunks, result.admissions) == ([0], [1], [], [])
    assert schedule(**fields, leaving={"window": 1}).preemptions == []


def test_each_group_decides_by_its_own_need():
    needs = {"new_pages": {"full": 4, "state": 3}, "growth": {"full": 2, "state": 0}}
    waiting = candidate(0, 64, **needs, idle_hits={"full": 0, "state": 1})
    assert schedule(room={"full": 6, "state": 4}, candidates=(waiting,)).admissions
    assert schedule(room={"full": 6, "state": 3}, candidates=(waiting,)).blocked is Blocked.PAGES
    assert schedule(room={"full": 5, "state": 4}, candidates=(waiting,)).blocked is Blocked.PAGES
