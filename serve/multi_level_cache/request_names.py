"""From a message's page ranges to the names of the objects that they mean."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve.hashing import DIGEST_BYTES
from serve.ipc.messages import Claim, PageRange
from serve.multi_level_cache.page_state import PageKey
from serve.multi_level_cache.statistics import CacheStatistics


@dataclass(frozen=True)
class RequestNames:
    """The page names of a request, in order, and the root before the first. num_prompt: tokens of its prompt."""

    root: bytes
    names: list[bytes]
    num_prompt: int = 0


class NameSource(Protocol):
    """Where names of living requests are found."""

    def read(self, slot: int, generation: int) -> RequestNames | None:
        """Names of the request; None when the slot has been given to another one."""


class _Table(Protocol):
    def generation(self, slot: int) -> int: ...
    def is_free(self, slot: int) -> bool: ...
    def root(self, slot: int) -> bytes: ...
    def names(self, slot: int) -> list[bytes]: ...
    def num_prompt(self, slot: int) -> int: ...


class TableNames:
    """Names from the request table.

    A slot is refilled only after its release, so what was read is the request's own if the slot was not yet released
    *after* the read. Comparing generations alone is not enough: the body is written before the generation is bumped.
    """

    def __init__(self, table: _Table, num_slots: int) -> None:
        self._table = table
        self._num_slots = num_slots

    def read(self, slot: int, generation: int) -> RequestNames | None:
        """Names of the request; None when the slot has been given to another one."""
        if not 0 <= slot < self._num_slots or self._table.generation(slot) != generation:
            return None
        names = RequestNames(self._table.root(slot), self._table.names(slot), self._table.num_prompt(slot))
        if self._table.is_free(slot) or self._table.generation(slot) != generation:
            return None
        return names


@dataclass(frozen=True)
class WantedObject:
    """One object of a message. range_index, page_index: where the message names it."""

    range_index: int
    page_index: int
    key: PageKey
    parent: bytes
    root: bytes


class RangeError(ValueError):
    """A message names pages that its request does not have, or a group that the model does not have."""


def wanted_objects(names: RequestNames, ranges: Sequence[PageRange]) -> list[WantedObject]:
    """All objects of ranges whose names are a request's, in order. Raises RangeError for pages beyond the names."""
    wanted = []
    for range_index, pages in enumerate(ranges):
        if pages.first < 0 or pages.count < 0 or pages.first + pages.count > len(names.names):
            raise RangeError(f"pages [{pages.first}, {pages.first + pages.count}) of {len(names.names)}")
        for index in range(pages.first, pages.first + pages.count):
            parent = names.names[index - 1] if index else names.root
            key = PageKey(names.names[index], pages.group)
            wanted.append(WantedObject(range_index, index, key, parent, names.root))
    return wanted


def claimed_objects(claim: Claim) -> list[WantedObject]:
    """All objects of a claim that brings its own names. Raises RangeError when their number does not fit."""
    counts = [pages.count for pages in claim.ranges]
    if min(counts, default=0) < 0 or len(claim.names) != sum(counts) * DIGEST_BYTES:
        raise RangeError(f"{len(claim.names)} bytes of names for {sum(counts)} pages")
    if len(claim.parents) != len(counts) * DIGEST_BYTES or len(claim.root) != DIGEST_BYTES:
        raise RangeError(f"{len(claim.parents)} bytes of parents, {len(claim.root)} of root for {len(counts)} ranges")
    names, parents = _split(claim.names), _split(claim.parents)
    wanted, position = [], 0
    for range_index, pages in enumerate(claim.ranges):
        parent = parents[range_index]
        for index in range(pages.first, pages.first + pages.count):
            name = names[position]
            wanted.append(WantedObject(range_index, index, PageKey(name, pages.group), parent, claim.root))
            parent, position = name, position + 1
    return wanted


class NameResolver:
    """Turns messages into wanted objects; one that cannot be meant for this model is counted and wants nothing."""

    def __init__(self, groups: Container[str], stats: CacheStatistics) -> None:
        self._groups = groups
        self._stats = stats

    def of_request(self, names: RequestNames, ranges: Sequence[PageRange], num_ranks: int) -> list[WantedObject]:
        """Objects of a message about a living request."""
        try:
            wanted = wanted_objects(names, ranges)
        except RangeError:
            wanted = []
        return self._checked(wanted, num_ranks)

    def of_claim(self, claim: Claim) -> list[WantedObject]:
        """Objects of a claim that brings its own names."""
        try:
            wanted = claimed_objects(claim)
        except RangeError:
            wanted = []
        return self._checked(wanted, claim.num_ranks)

    def _checked(self, wanted: list[WantedObject], num_ranks: int) -> list[WantedObject]:
        if wanted and num_ranks >= 1 and all(each.key.group in self._groups for each in wanted):
            return wanted
        self._stats.events["malformed"] += 1
        return []


def as_ranges(objects: Sequence[WantedObject]) -> list[PageRange]:
    """The fewest ranges, within those of the message, that name exactly these objects (given in order)."""
    ranges: list[PageRange] = []
    previous: WantedObject | None = None
    for wanted in objects:
        follows = (
            previous is not None
            and previous.range_index == wanted.range_index
            and previous.page_index + 1 == wanted.page_index
        )
        if follows:
            last = ranges[-1]
            ranges[-1] = PageRange(last.group, last.first, last.count + 1)
        else:
            ranges.append(PageRange(wanted.key.group, wanted.page_index, 1))
        previous = wanted
    return ranges


def _split(names: bytes) -> list[bytes]:
    return [names[start : start + DIGEST_BYTES] for start in range(0, len(names), DIGEST_BYTES)]
