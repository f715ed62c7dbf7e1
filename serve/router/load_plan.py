"""What to load for a request: the usable prefix over all tiers, and which of its pages the device lacks. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve.router.found import Found
from serve.router.ledger import StateLedger
from serve.router.prefix_index import GroupPages, first_needed, longest_common


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A prefix of `num_pages` pages, of which the device alone has the first `num_device`.

    missing: by group, pages that the prefix needs and the device lacks, ascending.
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


class PlanMaker:
    """page_bytes: by group, bytes of a page on all ranks; groups without bytes need no transfer."""

    def __init__(self, ledger: StateLedger, page_bytes: Mapping[str, int]) -> None:
        self._ledger = ledger
        self.page_bytes = page_bytes

    def plan(self, names: Sequence[bytes], num_tokens: int, found: Found) -> LoadPlan | None:
        """The longest prefix that device, host and disk have together; None when the device has as much alone."""
        return self._plan(names, self._most(names, num_tokens), found)

    def num_known(self, names: Sequence[bytes], num_tokens: int, found: Found) -> int:
        """Pages of the longest prefix as far as the FULL groups decide, over all tiers."""
        there = [group for group in self._everywhere(found) if group.spec.is_full]
        return longest_common(there, names, self._most(names, num_tokens)) if there else 0

    def _most(self, names: Sequence[bytes], num_tokens: int) -> int:
        return min(len(names), max(0, num_tokens - 1) // self._ledger.page_size)

    def _everywhere(self, found: Found) -> list[GroupPages]:
        groups = self._ledger.groups.items()
        return [GroupPages(group.spec, group.index, self._below(name, found)) for name, group in groups]

    def cut(self, plan: LoadPlan, names: Sequence[bytes], found: Found, most: Mapping[str, int]) -> LoadPlan | None:
        """The longest plan within this one that loads at most so many pages by group; None when that gains nothing."""
        shorter: LoadPlan | None = plan
        while shorter is not None:
            upto = min(self._upto(shorter, group, most[group]) for group in shorter.missing)
            if upto == shorter.num_pages:
                return shorter
            shorter = self._plan(names, upto, found)
        return None

    def _upto(self, plan: LoadPlan, group: str, most: int) -> int:
        """A plan that loads at most so many pages of the group has at most so many pages."""
        pages = plan.missing[group]
        if len(pages) <= most:
            return plan.num_pages
        if self._ledger.groups[group].spec.is_full:
            return pages[max(0, most)]
        return plan.num_pages - 1 if most > 0 else pages[0]

    def _plan(self, names: Sequence[bytes], upto: int, found: Found) -> LoadPlan | None:
        groups = self._ledger.groups
        here = [GroupPages(group.spec, group.index) for group in groups.values()]
        length = longest_common(self._everywhere(found), names, upto)
        num_device = longest_common(here, names, length)
        if length <= num_device:
            return None
        missing = {
            name: [at for at in range(first_needed(group.spec, length), length) if names[at] not in group.index]
            for name, group in groups.items()
        }
        return LoadPlan(length, num_device, missing)

    def _below(self, group: str, found: Found) -> int:
        return found.anywhere(group) if self.page_bytes[group] else -1

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
