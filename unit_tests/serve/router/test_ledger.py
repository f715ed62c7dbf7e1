"""What the ledger grants, keeps and evicts."""

import pytest

from models.state_layout import HitPolicy
from serve.router.ledger import JobEnd, LedgerError, Publication, Reservation, StateLedger
from serve.router.prefix_index import GroupSpec
from serve.types import JobId, JobResult

PAGE = 16
FULL = GroupSpec("full")


def names_of(text: str) -> list[bytes]:
    """Chained names: a name stands for its page and all before it."""
    return [text[: end + 1].encode() for end in range(len(text))]


def make_ledger(num_pages: int = 8, *specs: GroupSpec) -> StateLedger:
    specs = specs or (FULL,)
    return StateLedger(specs, {spec.name: num_pages for spec in specs}, PAGE)


def store(ledger: StateLedger, text: str):
    """A holding with the pages of `text`, all published."""
    names = names_of(text)
    match = ledger.match(names, len(text) * PAGE + 1)
    holding = ledger.acquire(match)
    missing = len(text) - match.num_pages
    assert ledger.reserve(holding, dict.fromkeys(ledger.groups, missing)) is Reservation.GRANTED
    for group, pages in holding.pages.items():
        for page, name in zip(pages[match.num_pages :], names[match.num_pages :], strict=True):
            ledger.publish(group, page, name)
    return holding


def cached(ledger: StateLedger, text: str) -> int:
    return ledger.match(names_of(text), len(text) * PAGE + 1).num_pages


def test_a_released_prefix_is_matched_again():
    ledger = make_ledger()
    ledger.release(store(ledger, "abc"))
    assert cached(ledger, "abc") == 3
    assert cached(ledger, "abd") == 2
    assert cached(ledger, "x") == 0
    assert ledger.check_integrity() == []


@pytest.mark.parametrize(("num_tokens", "usable"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_the_last_token_is_always_computed(num_tokens: int, usable: int):
    ledger = make_ledger()
    ledger.release(store(ledger, "abc"))
    assert ledger.match(names_of("abc")[: num_tokens // PAGE], num_tokens).num_pages == usable


def test_only_what_is_missing_is_evicted_and_leaves_go_first():
    ledger = make_ledger(6)
    ledger.release(store(ledger, "abc"))
    ledger.release(store(ledger, "xy"))
    holding = ledger.acquire(ledger.match([], 1))
    assert ledger.extend(holding, "full", 3) is Reservation.GRANTED
    assert ledger.groups["full"].num_evicted == 2
    assert cached(ledger, "abc") == 1
    assert cached(ledger, "xy") == 2
    assert ledger.check_integrity() == []


def test_use_of_a_prefix_protects_it_from_eviction():
    ledger = make_ledger(4)
    ledger.release(store(ledger, "ab"))
    ledger.release(store(ledger, "xy"))
    ledger.release(ledger.acquire(ledger.match(names_of("ab"), 100)))
    store(ledger, "q")
    assert cached(ledger, "ab") == 2
    assert cached(ledger, "xy") == 1


def test_pages_in_use_are_never_evicted():
    ledger = make_ledger(4)
    store(ledger, "abc")
    holding = ledger.acquire(ledger.match([], 1))
    assert ledger.extend(holding, "full", 2) is Reservation.NO_ROOM
    assert ledger.extend(holding, "full", 1) is Reservation.GRANTED
    assert cached(ledger, "abc") == 3


def test_a_reservation_is_given_in_all_groups_or_in_none():
    specs = (FULL, GroupSpec("draft"))
    ledger = StateLedger(specs, {"full": 8, "draft": 2}, PAGE)
    holding = ledger.acquire(ledger.match([], 1))
    assert ledger.reserve(holding, {"full": 3, "draft": 3}) is Reservation.NO_ROOM
    assert holding.pages == {"full": [], "draft": []}
    assert ledger.room() == {"full": 8, "draft": 2}
    assert ledger.check_integrity() == []


def test_a_name_that_is_indexed_keeps_its_first_page():
    ledger = make_ledger()
    first = store(ledger, "a")
    second = ledger.acquire(ledger.match([], 1))
    ledger.extend(second, "full", 1)
    assert ledger.publish("full", second.pages["full"][0], b"a") is Publication.DUPLICATE
    ledger.release(second)
    assert ledger.groups["full"].num_free == 7
    ledger.release(first)
    assert cached(ledger, "a") == 1
    assert ledger.check_integrity() == []


def test_a_prefix_is_as_long_as_every_group_allows():
    window = GroupSpec("window", HitPolicy.TRAILING_PAGES, 2)
    state = GroupSpec("state", HitPolicy.EXACT_CHECKPOINT)
    ledger = make_ledger(16, FULL, window, state)
    names = names_of("abcdef")
    holding = ledger.acquire(ledger.match([], 1))
    ledger.reserve(holding, {"full": 6, "window": 6, "state": 6})
    for place, name in enumerate(names):
        ledger.publish("full", holding.pages["full"][place], name)
        if place != 4:
            ledger.publish("window", holding.pages["window"][place], name)
        if place in (1, 3):
            ledger.publish("state", holding.pages["state"][place], name)
    match = ledger.match(names, 1000)
    assert match.num_pages == 4  # 5 and 6 lack the window's fifth page
    assert [len(match.pages[g]) for g in ("full", "window", "state")] == [4, 2, 1]
    ledger.forget("state", holding.pages["state"][3])
    assert ledger.match(names, 1000).num_pages == 2
    assert ledger.check_integrity() == []


def test_a_job_keeps_its_pages_until_every_rank_has_answered():
    ledger = make_ledger(2)
    holding = store(ledger, "ab")
    job = JobId(1, 1)
    ledger.begin_job(job, "full", holding.pages["full"], num_ranks=2)
    ledger.release(holding)
    assert ledger.groups["full"].num_used == 2
    assert ledger.end_job(job, 1, JobResult.DONE) is None
    assert ledger.end_job(job, 1, JobResult.DONE) is None
    assert ledger.groups["full"].num_used == 2
    assert ledger.end_job(job, 0, JobResult.FAILED) == JobEnd(job, JobResult.FAILED)
    assert ledger.groups["full"].num_cached == 2
    assert ledger.end_job(job, 0, JobResult.DONE) is None
    assert ledger.check_integrity() == []


def test_flush_empties_the_index_and_tells_what_is_still_in_use():
    ledger = make_ledger()
    ledger.release(store(ledger, "ab"))
    store(ledger, "xyz")
    report = ledger.flush()
    assert (report.num_dropped, report.num_referenced) == (2, 3)
    assert cached(ledger, "ab") == 0
    assert cached(ledger, "xyz") == 0
    assert ledger.check_integrity() == []


def test_a_forgotten_page_in_use_is_free_when_released():
    ledger = make_ledger()
    holding = store(ledger, "ab")
    ledger.forget("full", holding.pages["full"][1])
    assert cached(ledger, "ab") == 1
    ledger.release(holding)
    assert ledger.groups["full"].num_cached == 1
    assert ledger.check_integrity() == []


def test_broken_contracts_raise():
    ledger = make_ledger()
    holding = store(ledger, "a")
    page = holding.pages["full"][0]
    ledger.begin_job(JobId(1, 1), "full", [page], 1)
    with pytest.raises(LedgerError):
        ledger.begin_job(JobId(1, 1), "full", [page], 1)
    ledger.end_job(JobId(1, 1), 0, JobResult.DONE)
    ledger.release(holding)
    with pytest.raises(LedgerError):
        ledger.release(holding)
    with pytest.raises(LedgerError):
        ledger.publish("full", page, b"z")
    ledger.forget("full", page)
    with pytest.raises(LedgerError):
        ledger.begin_job(JobId(1, 2), "full", [page], 1)


def test_a_job_keeps_an_idle_page_from_eviction():
    ledger = make_ledger()
    holding = store(ledger, "a")
    page = holding.pages["full"][0]
    ledger.release(holding)
    ledger.begin_job(JobId(1, 1), "full", [page], 2)
    other = ledger.acquire(ledger.match([], 1))
    ledger.extend(other, "full", ledger.room()["full"])
    assert page not in other.pages["full"]
    ledger.release(other)
    ledger.end_job(JobId(1, 1), 0, JobResult.DONE)
    assert ledger.groups["full"].refs(page) == 1
    ledger.end_job(JobId(1, 1), 1, JobResult.FAILED)
    assert ledger.groups["full"].refs(page) == 0
    assert ledger.check_integrity() == []


def test_assemble_mixes_indexed_and_fresh_pages_in_order():
    ledger = make_ledger()
    stored = store(ledger, "abc")
    kept = dict(stored.pages)
    ledger.release(stored)
    ledger.forget("full", kept["full"][1])
    holding, fresh = ledger.assemble(names_of("abc"))
    assert fresh["full"] == [1]
    assert [holding.pages["full"][place] for place in (0, 2)] == [kept["full"][place] for place in (0, 2)]
    ledger.release(holding)
    assert ledger.check_integrity() == []


def test_assemble_takes_nothing_when_there_is_no_room():
    ledger = make_ledger()
    room = ledger.room()["full"]
    holding = ledger.acquire(ledger.match([], 1))
    ledger.extend(holding, "full", room - 1)
    assert ledger.assemble(names_of("ab")) is None
    assert ledger.room()["full"] == 1
    assert ledger.check_integrity() == []


def test_a_lost_reference_is_reported():
    ledger = make_ledger()
    holding = store(ledger, "a")
    ledger.groups["full"]._refs[holding.pages["full"][0]] += 1
    assert ledger.check_integrity()


# --- windows and checkpoints ---

WINDOW = GroupSpec("window", HitPolicy.TRAILING_PAGES, 2)
STATE = GroupSpec("state", HitPolicy.EXACT_CHECKPOINT)


def hybrid(text: str, checkpoints: tuple[int, ...], num_pages: int = 16) -> StateLedger:
    """A ledger whose index has all pages of `text`, and states at these places."""
    ledger = make_ledger(num_pages, FULL, WINDOW, STATE)
    holding = ledger.open()
    ledger.reserve(holding, {"full": len(text), "window": len(text), "state": len(checkpoints)})
    for place, name in enumerate(names_of(text)):
        ledger.publish("full", holding.pages["full"][place], name)
        ledger.publish("window", holding.pages["window"][place], name)
    for page, place in zip(holding.pages["state"], checkpoints, strict=True):
        ledger.publish("state", page, names_of(text)[place])
    ledger.release(holding)
    return ledger


def test_a_match_tells_how_far_another_has_been():
    ledger = hybrid("abcdef", (1,))
    match = ledger.match(names_of("abcdxy"), 1000)
    assert (match.num_pages, match.num_known) == (2, 4)


def test_a_holding_has_the_trailing_pages_of_a_window_and_one_checkpoint():
    ledger = hybrid("abcdef", (3,))
    match = ledger.match(names_of("abcdef"), 1000)
    holding = ledger.acquire(match)
    assert (holding.first("window"), holding.end("window"), holding.end("full")) == (2, 4, 4)
    assert holding.restores == {"state": match.pages["state"][0]}
    assert holding.pages["state"] == []
    assert holding.page_at("window", 3) == match.pages["window"][1]
    assert ledger.check_integrity() == []
    ledger.release(holding)
    assert [group.num_used for group in ledger.groups.values()] == [0, 0, 0]
    assert ledger.check_integrity() == []


def test_what_a_plan_uses_last_changes_hands_and_stays_referenced():
    ledger = hybrid("abcdef", (3,))
    holding, plan = ledger.acquire(ledger.match(names_of("abcdef"), 1000)), ledger.open()
    restored, first = holding.restores["state"], holding.pages["window"][0]
    ledger.reserve(holding, {"window": 1, "state": 3})
    assert ledger.leave_window(holding, "window", 3, plan) == 1
    ledger.pass_restores(holding, plan)
    last = ledger.pass_last(holding, "state", plan)
    assert (holding.first("window"), len(holding.pages["state"]), holding.restores) == (3, 2, {})
    assert plan.pages == {"full": [], "window": [first], "state": [restored, last]}
    ledger.release(holding)
    assert all(ledger.groups[g].refs(page) == 1 for g, page in (("window", first), ("state", restored)))
    assert ledger.check_integrity() == []
    ledger.release(plan)
    assert ledger.groups["window"].num_cached == 6
    assert ledger.groups["state"].num_free == 15
    assert ledger.check_integrity() == []


def test_a_window_that_is_behind_already_is_left_alone():
    ledger = hybrid("abcdef", (3,))
    holding, plan = ledger.acquire(ledger.match(names_of("abcdef"), 1000)), ledger.open()
    assert ledger.leave_window(holding, "window", 1, plan) == 0
    assert holding.first("window") == 2


def test_assemble_takes_what_each_group_needs_for_the_prefix():
    ledger = hybrid("abcdef", ())
    gone = ledger.groups["window"].index.page(names_of("abcdef")[4])
    ledger.forget("window", gone)
    holding, fresh = ledger.assemble(names_of("abcdef"))
    assert fresh == {"full": [], "window": [4], "state": [5]}
    assert (holding.first("window"), len(holding.pages["window"])) == (4, 2)
    assert holding.page_at("state", 5) == holding.restores["state"]
    assert ledger.check_integrity() == []
