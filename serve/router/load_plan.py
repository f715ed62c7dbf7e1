"""What to load for a request: the usable prefix over all tiers, and which of its pages the device lacks. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve.router.found import Found
from serve.router.ledger import StateLedger
from serve.router.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A prefix of `num_pages` pages, of which the device alone has the first `num_device`.

    missing: by group, pages of the prefix that the device lacks, ascending.
    """

    num_pages: int
    num_device: int
    missing: dict[str, list[int]]

    @property
    def num_gained(self) -> int:
        """Pages that need not be computed thanks to the load."""
        return self.num_pages - self.num_device

    @property
    def first_missing(self) -> int:
        """The first page to load."""
        return min(pages[0] for pages in self.missing.values() if pages)

    def cut(self, most: Mapping[str, int]) -> "LoadPlan | None":
        """The longest part of it that loads at most so many pages by group; None when that gains nothing."""
        length = self.num_pages
        for group, pages in self.missing.items():
            if len(pages) > most[group]:
                length = min(length, pages[max(0, most[group])])
        if length <= self.num_device:
            return None
        missing = {group: [page for page in pages if page < length] for group, pages in self.missing.items()}
        return LoadPlan(length, self.num_device, missing)


class PlanMaker:
    """page_bytes: by group, bytes of a page on all ranks; groups without bytes need no transfer."""

    def __init__(self, ledger: StateLedger, page_bytes: Mapping[str, int]) -> None:
        self._ledger = ledger
        self.page_bytes = page_bytes

    def plan(self, names: Sequence[bytes], num_tokens: int, found: Found) -> LoadPlan | None:
        """The longest prefix that device, host and disk have together; None when the device has as much alone."""
        length = num_device = min(len(names), max(0, num_tokens - 1) // self._ledger.page_size)
        for name, group in self._ledger.groups.items():
            below = found.anywhere(name) if self.page_bytes[name] else -1  # -1: all of them
            num_device = _leading(group.index, names, num_device, 0)
            length = _leading(group.index, names, length, below)
        if length <= num_device:
            return None
        wanted = names[:length]
        missing = {
            name: [at for at, page in enumerate(wanted) if page not in group.index]
            for name, group in self._ledger.groups.items()
        }
        return LoadPlan(length, num_device, missing)

    def bytes_of(self, plan: LoadPlan) -> int:
        """Bytes to load."""
        return sum(len(pages) * self.page_bytes[group] for group, pages in plan.missing.items())

    def disk_bytes(self, plan: LoadPlan, found: Found) -> int:
        """Bytes to load that only the disk has."""
        total = 0
        for group, pages in plan.missing.items():
            host = found.host.get(group, 0)
            total += sum(not host >> page & 1 for page in pages) * self.page_bytes[group]
        return total


def _leading(index: PrefixIndex, names: Sequence[bytes], upto: int, below: int) -> int:
    """How many pages from the first on are indexed, or in the set `below`."""
    for place in range(upto):
        if names[place] not in index and not below >> place & 1:
            return place
    return upto
