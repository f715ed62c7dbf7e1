"""Which page has which name, and how long a prefix each hit policy calls usable."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from models.state_layout import HitPolicy, StateGroup


@dataclass(frozen=True)
class GroupSpec:
    """What the ledger must know of a state group. window_pages: trailing pages that a hit needs (TRAILING_PAGES)."""

    name: str
    policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 0

    @classmethod
    def of(cls, group: StateGroup, page_size: int) -> "GroupSpec":
        """From a model's layout; a window that begins inside a page needs the whole page."""
        return cls(group.name, group.hit_policy, -(-group.window_tokens // page_size))


class PrefixIndex:
    """A bijection between names and pages of one group."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._name_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._page_of

    def page(self, name: bytes) -> int | None:
        return self._page_of.get(name)

    def name(self, page: int) -> bytes | None:
        return self._name_of.get(page)

    def add(self, name: bytes, page: int) -> bool:
        """Index the page; False, and no change, when the name has a page or the page has a name."""
        if name in self._page_of or page in self._name_of:
            return False
        self._page_of[name] = page
        self._name_of[page] = name
        return True

    def remove(self, page: int) -> None:
        """Forget an indexed page."""
        del self._page_of[self._name_of.pop(page)]

    def check_integrity(self) -> list[str]:
        """Problems found; none when names and pages map to each other."""
        if len(self._page_of) != len(self._name_of):
            return [f"{len(self._page_of)} names but {len(self._name_of)} named pages"]
        return [f"page {p} is not what its name maps to" for p, n in self._name_of.items() if self._page_of.get(n) != p]


def _all_pages(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int) -> int:
    for length in range(upto):
        if names[length] not in index:
            return length
    return upto


def _trailing_pages(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int) -> int:
    length, run = upto, 0  # pages [length - run, length) are there
    while run < min(length, spec.window_pages):
        if names[length - run - 1] in index:
            run += 1
        else:
            length, run = length - run - 1, 0
    return length


def _exact_checkpoint(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int) -> int:
    for length in range(upto, 0, -1):
        if names[length - 1] in index:
            return length
    return 0


_LONGEST: dict[HitPolicy, Callable[[PrefixIndex, GroupSpec, Sequence[bytes], int], int]] = {
    HitPolicy.ALL_PAGES: _all_pages,
    HitPolicy.TRAILING_PAGES: _trailing_pages,
    HitPolicy.EXACT_CHECKPOINT: _exact_checkpoint,
}


def longest_legal(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int) -> int:
    """The most pages, at most `upto`, that this group alone allows a prefix to have. 0 is always legal."""
    return _LONGEST[spec.policy](index, spec, names, upto)


def first_needed(spec: GroupSpec, length: int) -> int:
    """A hit of `length` pages uses this group's pages [first_needed, length)."""
    if spec.policy is HitPolicy.ALL_PAGES:
        return 0
    needed = spec.window_pages if spec.policy is HitPolicy.TRAILING_PAGES else 1
    return max(0, length - needed)
