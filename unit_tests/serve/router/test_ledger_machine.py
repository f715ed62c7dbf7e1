"""The ledger under random use: its books must add up after every step, and no prefix may hold another's page."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from models.state_layout import HitPolicy
from serve.router.holding import Holding
from serve.router.ledger import Reservation, StateLedger
from serve.router.prefix_index import GroupSpec, first_needed
from serve.types import JobId, JobResult

PAGE = 16
NUM_PAGES = 14
NUM_RANKS = 2
WINDOW = 2
PAGED = (GroupSpec("full"), GroupSpec("window", HitPolicy.TRAILING_PAGES, WINDOW))
SPECS = (*PAGED, GroupSpec("state", HitPolicy.EXACT_CHECKPOINT))
texts = st.text("ab", min_size=1, max_size=6)


class _User:
    """A request: the text whose pages it holds and how many of them are published. It began with `num_cached`."""

    def __init__(self, text: str, holding: Holding, num_cached: int) -> None:
        self.text = text
        self.holding = holding
        self.num_cached = self.num_published = num_cached
        self.is_alive = True


class LedgerMachine(RuleBasedStateMachine):
    users = Bundle("users")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = StateLedger(SPECS, {spec.name: NUM_PAGES for spec in SPECS}, PAGE)
        self.content: dict[tuple[str, int], str] = {}  # what a page's bytes are: the text up to its end
        self.jobs: dict[JobId, tuple[set[int], str, list[int]]] = {}
        self.alive: list[_User] = []
        self.plans: list[Holding] = []  # in flight: what they are the last to use
        self.num_jobs = 0
        self.seen: tuple[int, list] | None = None  # version of the index, and what matched then

    @rule(target=users, text=texts)
    def admit(self, text: str) -> _User:
        names = [text[: end + 1].encode() for end in range(len(text))]
        match = self.ledger.match(names, len(text) * PAGE)
        assert match.num_pages <= len(text) - 1
        for spec in SPECS:
            needed = range(first_needed(spec, match.num_pages), match.num_pages)
            for place, page in zip(needed, match.pages[spec.name], strict=True):
                assert self.content[spec.name, page] == text[: place + 1]
        holding = self.ledger.acquire(match)
        user = _User(text, holding, match.num_pages)
        missing = {**dict.fromkeys(("full", "window"), len(text) - match.num_pages), "state": 1}
        room = self.ledger.room()
        outcome = self.ledger.reserve(holding, missing)
        assert (outcome is Reservation.GRANTED) == all(room[group] >= count for group, count in missing.items())
        if outcome is Reservation.NO_ROOM:
            self.ledger.release(holding)
            user.is_alive = False
            return user
        self._write(user, match.num_pages)
        self.alive.append(user)
        return user

    def _write(self, user: _User, start: int) -> None:
        """The bytes of its pages from `start` on become its own; nobody else may be using them."""
        written = [("state", len(user.text) - 1, user.holding.pages["state"][0])]
        for spec in PAGED:
            places = range(max(start, user.holding.first(spec.name)), len(user.text))
            written += [(spec.name, place, user.holding.page_at(spec.name, place)) for place in places]
        for group, place, page in written:
            assert self.ledger.groups[group].refs(page) == 1
            assert self.ledger.groups[group].index.name(page) is None
            assert all(group != g or page not in held for _, g, held in self.jobs.values())
            self.content[group, page] = user.text[: place + 1]

    @rule(user=users, tail=st.text("ab", min_size=1, max_size=2))
    def extend(self, user: _User, tail: str) -> None:
        if not user.is_alive or len(user.text) > 8:
            return
        if self.ledger.reserve(user.holding, {s.name: len(tail) for s in PAGED}) is Reservation.GRANTED:
            start = len(user.text)
            user.text += tail
            self._write(user, start)

    @rule(user=users, count=st.integers(1, 8))
    def publish(self, user: _User, count: int) -> None:
        if not user.is_alive:
            return
        end = min(len(user.text), user.num_published + count)
        for place in range(user.num_published, end):
            for spec in PAGED:
                if place >= user.holding.first(spec.name):
                    page = user.holding.page_at(spec.name, place)
                    self.ledger.publish(spec.name, page, user.text[: place + 1].encode())
        user.num_published = end

    @rule(user=users)
    def snapshot(self, user: _User) -> None:
        """The state of its whole text becomes a checkpoint, which the plan holds that makes it."""
        plan = self.ledger.open()
        self.plans.append(plan)
        if user.is_alive and self.ledger.extend(plan, "state", 1) is Reservation.GRANTED:
            page = plan.pages["state"][0]
            self.content["state", page] = self.content["state", user.holding.pages["state"][0]]
            self.ledger.publish("state", page, user.text.encode())

    @rule(user=users)
    def go_on(self, user: _User) -> None:
        """A plan begins with what the user was acquired with, and leaves what its window does not see any more."""
        plan = self.ledger.open()
        self.plans.append(plan)
        if user.is_alive:
            self.ledger.pass_restores(user.holding, plan)
            self.ledger.leave_window(user.holding, "window", user.num_published - WINDOW, plan)

    @rule()
    def a_plan_ends(self) -> None:
        if self.plans:
            self.ledger.release(self.plans.pop(0))

    @rule(group=st.sampled_from([spec.name for spec in SPECS]), data=st.data())
    def evict_one_group_alone(self, group: str, data: st.DataObject) -> None:
        idle = list(self.ledger.groups[group]._idle)
        if idle:
            self.ledger.forget(group, data.draw(st.sampled_from(idle)))

    @rule(user=consumes(users))
    def end_or_preempt(self, user: _User) -> None:
        if user.is_alive:
            self.ledger.release(user.holding)
            self.alive.remove(user)
            user.is_alive = False

    @rule(user=users, group=st.sampled_from([spec.name for spec in SPECS]), data=st.data())
    def begin_job(self, user: _User, group: str, data: st.DataObject) -> None:
        if not user.is_alive:
            return
        pages = list(self.ledger.groups[group].index) if group == "state" else user.holding.pages[group]
        if not pages:
            return
        pages = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
        self.num_jobs += 1
        job = JobId(1, self.num_jobs)
        self.ledger.begin_job(job, group, pages, NUM_RANKS)
        self.jobs[job] = (set(range(NUM_RANKS)), group, pages)

    @rule(data=st.data(), result=st.sampled_from(JobResult))
    def answer_job(self, data: st.DataObject, result: JobResult) -> None:
        if not self.jobs:
            return
        job = data.draw(st.sampled_from(sorted(self.jobs, key=lambda job: job.counter)))
        rank = data.draw(st.integers(0, NUM_RANKS - 1))
        waiting = self.jobs[job][0]
        ended = self.ledger.end_job(job, rank, result)
        was_last = waiting == {rank}
        waiting.discard(rank)
        assert (ended is not None) == was_last
        if not waiting:
            del self.jobs[job]

    @rule(user=users, first=st.integers(0, 6))
    def forget(self, user: _User, first: int) -> None:
        if user.is_alive:
            for spec in PAGED:
                for page in user.holding.pages[spec.name][first:]:
                    self.ledger.forget(spec.name, page)

    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        assert all(group.num_cached == 0 for group in self.ledger.groups.values())

    @rule(count=st.integers(1, NUM_PAGES))
    def squeeze(self, count: int) -> None:
        """Take pages for a moment: evicts exactly what is missing."""
        before = {name: (g.num_free, g.num_cached) for name, g in self.ledger.groups.items()}
        holding = self.ledger.acquire(self.ledger.match([], 1))
        if self.ledger.extend(holding, "full", count) is Reservation.GRANTED:
            free, cached = before["full"]
            assert self.ledger.groups["full"].num_cached == cached - max(0, count - free)
        self.ledger.release(holding)

    @invariant()
    def the_books_add_up(self) -> None:
        assert self.ledger.check_integrity() == []

    @invariant()
    def the_index_tells_the_truth(self) -> None:
        for name, group in self.ledger.groups.items():
            for page in group.index:
                assert group.index.name(page) == self.content[name, page].encode()

    @invariant()
    def matches_of_one_version_are_equal(self) -> None:
        version = self.ledger.index_version
        found = [
            self.ledger.match([text[: end + 1].encode() for end in range(len(text))], 100 * PAGE)
            for text in ("aaaaaa", "ababab", "bbbbbb", "abbabb")
        ]
        if self.seen is not None and self.seen[0] == version:
            assert self.seen[1] == found
        self.seen = (version, found)

    @invariant()
    def holders_still_have_their_bytes(self) -> None:
        for user in self.alive:
            for spec in PAGED:
                for place, page in enumerate(user.holding.pages[spec.name], user.holding.first(spec.name)):
                    assert self.content[spec.name, page] == user.text[: place + 1]
            assert self.content["state", user.holding.pages["state"][0]] == user.text
            for page in user.holding.restores.values():
                assert self.content["state", page] == user.text[: user.num_cached]


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
