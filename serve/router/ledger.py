"""The ledger of device pages: what is free, who holds what, which prefixes are there. Bookkeeping only, no bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from serve.router.group_ledger import GroupLedger
from serve.router.holding import Holding
from serve.router.prefix_index import GroupPages, GroupSpec, first_needed, longest_common
from serve.types import JobId, JobResult


class LedgerError(Exception):
    """A caller broke the ledger's contract: a bug in the router, never a user's fault."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A usable prefix of `num_pages` pages; `pages[g]` are those that group g needs for it, in order.

    num_known: pages of the prefix that the FULL groups alone would allow: another request has been there.
    """

    num_pages: int
    pages: dict[str, list[int]]
    num_known: int = field(default=0, compare=False)


class Reservation(Enum):
    """Outcome of `reserve` and `extend`."""

    GRANTED = "granted"
    NO_ROOM = "no_room"


class Publication(Enum):
    """Outcome of `publish`: DUPLICATE when another page has the name already, which stays."""

    PUBLISHED = "published"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """All ranks have answered. result: DONE when all said so, else the first other answer."""

    job: JobId
    result: JobResult


@dataclass(frozen=True, slots=True)
class FlushReport:
    """num_dropped: idle pages freed. num_referenced: pages in use that left the index, free when their holders end."""

    num_dropped: int
    num_referenced: int


@dataclass(slots=True)
class _Job:
    group: str
    pages: list[int]
    waiting: set[int]
    results: list[JobResult] = field(default_factory=list)


class StateLedger:
    """Owner of every device page of every state group. One thread."""

    def __init__(self, specs: Sequence[GroupSpec], num_pages: Mapping[str, int], page_size: int) -> None:
        self.page_size = page_size
        self.groups = {spec.name: GroupLedger(spec, num_pages[spec.name]) for spec in specs}
        self._groups = tuple(GroupPages(group.spec, group.index) for group in self.groups.values())
        self._full = tuple(group for group in self._groups if group.spec.is_full)
        self.index_version = 0  # changes whenever a match may give something else
        self._holdings: set[Holding] = set()
        self._jobs: dict[JobId, _Job] = {}

    # --- prefixes ---

    def match(self, names: Sequence[bytes], num_tokens: int) -> PrefixMatch:
        """The longest prefix that is legal in every group; the last of the request's tokens is never in it."""
        most = min(len(names), max(0, num_tokens - 1) // self.page_size)
        known = longest_common(self._full, names, most)
        length = longest_common(self._groups, names, known) if len(self._full) < len(self._groups) else known
        return PrefixMatch(length, {g: self._pages_of(group, names, length) for g, group in self.groups.items()}, known)

    @staticmethod
    def _pages_of(group: GroupLedger, names: Sequence[bytes], length: int) -> list[int]:
        pages = (group.index.page(name) for name in names[first_needed(group.spec, length) : length])
        return [page for page in pages if page is not None]

    def num_idle(self, match: PrefixMatch) -> dict[str, int]:
        """By group, matched pages that nobody references: acquiring them shrinks the room."""
        return {g: sum(self.groups[g].refs(page) == 0 for page in pages) for g, pages in match.pages.items()}

    def publish(self, group: str, page: int, name: bytes, root: bytes = b"") -> Publication:
        """Index a referenced page, once the plan that completes it is sent. A name that has a page keeps it.

        root: what the name goes back to, for `flush`.
        """
        ledger = self.groups[group]
        if ledger.refs(page) == 0:
            raise LedgerError(f"page {page} of {group} is published but not held")
        if not ledger.index.add(name, page, root):
            return Publication.DUPLICATE
        self.index_version += 1
        return Publication.PUBLISHED

    def forget(self, group: str, page: int) -> None:
        """Take a page out of the index: its bytes are not to be trusted, or not worth keeping."""
        self.groups[group].forget(page)
        self.index_version += 1

    # --- holdings ---

    def acquire(self, match: PrefixMatch) -> Holding:
        """Reference the matched pages for one request. The match must be of this moment."""
        holding = self.open()
        for group, pages in match.pages.items():
            self.groups[group].ref(pages)
            self._set_prefix(holding, group, match.num_pages, list(pages))
        return holding

    def open(self) -> Holding:
        """A holding without pages."""
        holding = Holding({group: [] for group in self.groups})
        self._holdings.add(holding)
        return holding

    def _set_prefix(self, holding: Holding, group: str, length: int, pages: list[int]) -> None:
        """`pages` are what the group needs for a prefix of `length` pages."""
        spec = self.groups[group].spec
        if spec.has_checkpoints:
            holding.restores.update((group, page) for page in pages)
            return
        holding.pages[group] = pages
        if spec.has_window:
            holding.first_places[group] = first_needed(spec, length)

    def room(self) -> dict[str, int]:
        """Pages by group that could be had now, evicting all that is idle."""
        return {name: group.room for name, group in self.groups.items()}

    def reserve(self, holding: Holding, counts: Mapping[str, int]) -> Reservation:
        """Append fresh pages to a holding, in all groups or in none."""
        if any(self.groups[group].room < count for group, count in counts.items()):
            return Reservation.NO_ROOM
        for group, count in counts.items():
            self._append(holding, group, count)
        return Reservation.GRANTED

    def assemble(self, names: Sequence[bytes]) -> tuple[Holding, dict[str, list[int]]] | None:
        """A holding with all pages that a prefix of these names needs: the indexed ones, and fresh ones.

        Returns it and, by group, which places are fresh; None when there is no room.
        """
        length = len(names)
        needed = {name: range(first_needed(group.spec, length), length) for name, group in self.groups.items()}
        indexed = {name: [self.groups[name].index.page(names[at]) for at in needed[name]] for name in self.groups}
        present = {name: [page for page in pages if page is not None] for name, pages in indexed.items()}
        num_fresh = {name: len(pages) - len(present[name]) for name, pages in indexed.items()}
        idle = self.num_idle(PrefixMatch(length, present))
        if any(group.room - idle[name] < num_fresh[name] for name, group in self.groups.items()):
            return None
        holding = self.open()
        for group, pages in present.items():  # first of all: nothing may evict what is there
            self.groups[group].ref(pages)
        for group, found in indexed.items():
            taken = iter(self._take(group, num_fresh[group]))
            self._set_prefix(holding, group, length, [next(taken) if page is None else page for page in found])
        fresh = {
            name: [at for at, page in zip(needed[name], pages, strict=True) if page is None]
            for name, pages in indexed.items()
        }
        return holding, fresh

    def extend(self, holding: Holding, group: str, count: int) -> Reservation:
        """Append `count` fresh pages of one group."""
        return self.reserve(holding, {group: count})

    def _append(self, holding: Holding, group: str, count: int) -> None:
        holding.pages[group].extend(self._take(group, count))

    def _take(self, group: str, count: int) -> list[int]:
        ledger = self.groups[group]
        if count > ledger.num_free:
            self.index_version += 1
        return ledger.take(count)

    # --- what a plan in flight reads or writes for the last time ---

    def leave_window(self, holding: Holding, group: str, first: int, to: Holding) -> int:
        """The group's pages of places below `first` change hands; returns how many."""
        count = min(max(0, first - holding.first(group)), len(holding.pages[group]))
        to.pages[group] += holding.pages[group][:count]
        del holding.pages[group][:count]
        holding.first_places[group] = holding.first(group) + count
        return count

    def pass_restores(self, holding: Holding, to: Holding) -> None:
        """The checkpoints that the holding was acquired with change hands."""
        for group, page in holding.restores.items():
            to.pages[group].append(page)
        holding.restores = {}

    def pass_last(self, holding: Holding, group: str, to: Holding) -> int:
        """The group's last page changes hands; returns it."""
        page = holding.pages[group].pop()
        to.pages[group].append(page)
        return page

    # --- the end of holdings ---

    def num_exclusive(self, holding: Holding) -> dict[str, int]:
        """By group, pages that releasing this holding would make room of."""
        return {
            name: sum(group.refs(page) == 1 for page in holding.references(name)) for name, group in self.groups.items()
        }

    def release(self, holding: Holding) -> None:
        """Drop all references of a holding, deepest page first. Once."""
        if holding not in self._holdings:
            raise LedgerError("a holding is released twice")
        self._holdings.remove(holding)
        for name, group in self.groups.items():
            group.unref(list(holding.references(name)))
        holding.pages = {group: [] for group in holding.pages}
        holding.restores = {}

    # --- jobs ---

    def begin_job(self, job: JobId, group: str, pages: Sequence[int], num_ranks: int) -> None:
        """Keep pages that are held or in the index until every rank has answered."""
        ledger = self.groups[group]
        if job in self._jobs:
            raise LedgerError(f"{job} has begun already")
        if any(ledger.refs(page) == 0 and ledger.index.name(page) is None for page in pages):
            raise LedgerError(f"{job} names a page that is free")
        ledger.ref(pages)
        self._jobs[job] = _Job(group, list(pages), set(range(num_ranks)))

    def end_job(self, job: JobId, rank: int, result: JobResult) -> JobEnd | None:
        """Take a rank's answer; JobEnd with the last one. Repeated and unknown answers change nothing."""
        entry = self._jobs.get(job)
        if entry is None or rank not in entry.waiting:
            return None
        entry.waiting.remove(rank)
        entry.results.append(result)
        if entry.waiting:
            return None
        del self._jobs[job]
        self.groups[entry.group].unref(entry.pages)
        bad = [result for result in entry.results if result is not JobResult.DONE]
        return JobEnd(job, bad[0] if bad else JobResult.DONE)

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    # --- all of it ---

    def flush(self, root: bytes | None = None) -> FlushReport:
        """Take all pages, or those under a root, out of the index of every group; free what is not referenced."""
        self.index_version += 1
        num_indexed = sum(len(group.index.pages_of(root)) for group in self.groups.values())
        num_dropped = sum(group.flush(root) for group in self.groups.values())
        return FlushReport(num_dropped, num_indexed - num_dropped)

    def check_integrity(self) -> list[str]:
        """Problems found: one line each, none when every count adds up."""
        problems = []
        for name, group in self.groups.items():
            held: Counter[int] = Counter()
            for holding in self._holdings:
                held.update(holding.references(name))
            for job in self._jobs.values():
                if job.group == name:
                    held.update(job.pages)
            problems += group.check_integrity(held)
        return problems
