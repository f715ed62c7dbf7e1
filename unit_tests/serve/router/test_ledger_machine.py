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
SPECS = (GroupSpec("full"), GroupSpec("window", HitPolicy.TRAILING_PAGES, 2))
texts = st.text("ab", min_size=1, max_size=6)


class _User:
    """A request: the text whose pages it holds and how many of them are published."""

    def __init__(self, text: str, holding: Holding, first: dict[str, int], num_published: int) -> None:
        self.text = text
        self.holding = holding
        self.first = first  # index of the first page that each group holds
        self.num_published = num_published
        self.is_alive = True


class LedgerMachine(RuleBasedStateMachine):
    users = Bundle("users")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = StateLedger(SPECS, {spec.name: NUM_PAGES for spec in SPECS}, PAGE)
        self.content: dict[tuple[str, int], str] = {}  # what a page's bytes are: the text up to its end
        self.jobs: dict[JobId, tuple[set[int], str, list[int]]] = {}
        self.alive: list[_User] = []
        self.num_jobs = 0
        self.seen: tuple[int, list] | None = None  # version of the index, and what matched then

    @rule(target=users, text=texts)
    def admit(self, text: str) -> _User:
        names = [text[: end + 1].encode() for end in range(len(text))]
        match = self.ledger.match(names, len(text) * PAGE)
        assert match.num_pages <= len(text) - 1
        first = {spec.name: first_needed(spec, match.num_pages) for spec in SPECS}
        for spec in SPECS:
            for place, page in enumerate(match.pages[spec.name], first[spec.name]):
                assert self.content[spec.name, page] == text[: place + 1]
        holding = self.ledger.acquire(match)
        user = _User(text, holding, first, match.num_pages)
        missing = len(text) - match.num_pages
        room = self.ledger.room()
        outcome = self.ledger.reserve(holding, {spec.name: missing for spec in SPECS})
        assert (outcome is Reservation.GRANTED) == all(free >= missing for free in room.values())
        if outcome is Reservation.NO_ROOM:
            self.ledger.release(holding)
            user.is_alive = False
            return user
        self._write(user, match.num_pages)
        self.alive.append(user)
        return user

    def _write(self, user: _User, start: int) -> None:
        """The bytes of its pages from `start` on become its own; nobody else may be using them."""
        for group, pages in user.holding.pages.items():
            for page in pages[start - user.first[group] :]:
                assert self.ledger.groups[group].refs(page) == 1
                assert all(group != g or page not in held for _, g, held in self.jobs.values())
            for place in range(start, len(user.text)):
                self.content[group, pages[place - user.first[group]]] = user.text[: place + 1]

    @rule(user=users, tail=st.text("ab", min_size=1, max_size=2))
    def extend(self, user: _User, tail: str) -> None:
        if not user.is_alive or len(user.text) > 8:
            return
        if self.ledger.reserve(user.holding, {s.name: len(tail) for s in SPECS}) is Reservation.GRANTED:
            start = len(user.text)
            user.text += tail
            self._write(user, start)

    @rule(user=users, count=st.integers(1, 8))
    def publish(self, user: _User, count: int) -> None:
        if not user.is_alive:
            return
        end = min(len(user.text), user.num_published + count)
        for place in range(user.num_published, end):
            for group, pages in user.holding.pages.items():
                self.ledger.publish(group, pages[place - user.first[group]], user.text[: place + 1].encode())
        user.num_published = end

    @rule(user=consumes(users))
    def end_or_preempt(self, user: _User) -> None:
        if user.is_alive:
            self.ledger.release(user.holding)
            self.alive.remove(user)
            user.is_alive = False

    @rule(user=users, group=st.sampled_from([spec.name for spec in SPECS]), data=st.data())
    def begin_job(self, user: _User, group: str, data: st.DataObject) -> None:
        if not user.is_alive or not user.holding.pages[group]:
            return
        pages = data.draw(st.lists(st.sampled_from(user.holding.pages[group]), min_size=1, unique=True))
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
            for group, pages in user.holding.pages.items():
                for page in pages[first:]:
                    self.ledger.forget(group, page)

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
            for group, pages in user.holding.pages.items():
                for place, page in enumerate(pages, user.first[group]):
                    assert self.content[group, page] == user.text[: place + 1]


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
