"""Which page has which name, and how long a prefix each hit policy calls usable."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from models.state_layout import HitPolicy, StateGroup


@dataclass(frozen=True)
class GroupSpec:
    """What the router must know of a state group. window_pages: trailing pages that a hit needs (TRAILING_PAGES)."""

    name: str
    policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 0

    @property
    def is_full(self) -> bool:
        """It keeps the pages of all places."""
        return self.policy is HitPolicy.ALL_PAGES

    @property
    def has_window(self) -> bool:
        """It keeps the pages of the last places."""
        return self.policy is HitPolicy.TRAILING_PAGES

    @property
    def has_checkpoints(self) -> bool:
        """Its objects are whole states, one for a boundary; it has no places."""
        return self.policy is HitPolicy.EXACT_CHECKPOINT

    @classmethod
    def of(cls, group: StateGroup, page_size: int) -> "GroupSpec":
        """From a model's layout; a window that begins inside a page needs the whole page."""
        return cls(group.name, group.hit_policy, -(-group.window_tokens // page_size))


class PrefixIndex:
    """A bijection between names and pages of one group, and the root that each name goes back to."""

    def __init__(self) -> None:
        self._root_of: dict[int, bytes] = {}
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

    def pages_of(self, root: bytes | None) -> list[int]:
        """Indexed pages under a root; None: all."""
        return [page for page in self._name_of if root is None or self._root_of[page] == root]

    def add(self, name: bytes, page: int, root: bytes = b"") -> bool:
        """Index the page; False, and no change, when the name has a page or the page has a name."""
        if name in self._page_of or page in self._name_of:
            return False
        self._page_of[name] = page
        self._name_of[page] = name
        self._root_of[page] = root
        return True

    def remove(self, page: int) -> None:
        """Forget an indexed page."""
        del self._page_of[self._name_of.pop(page)]
        del self._root_of[page]

    def check_integrity(self) -> list[str]:
        """Problems found; none when names and pages map to each other."""
        if len(self._root_of) != len(self._name_of):
            return [f"{len(self._root_of)} roots but {len(self._name_of)} named pages"]
        if len(self._page_of) != len(self._name_of):
            return [f"{len(self._page_of)} names but {len(self._name_of)} named pages"]
        return [f"page {p} is not what its name maps to" for p, n in self._name_of.items() if self._page_of.get(n) != p]


def _all_pages(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int, below: int) -> int:
    for length in range(upto):
        if names[length] not in index and not below >> length & 1:
            return length
    return upto


def _trailing_pages(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int, below: int) -> int:
    length, run = upto, 0  # pages [length - run, length) are there
    while run < min(length, spec.window_pages):
        place = length - run - 1
        if names[place] in index or below >> place & 1:
            run += 1
        else:
            length, run = place, 0
    return length


def _exact_checkpoint(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int, below: int) -> int:
    for length in range(upto, 0, -1):
        if names[length - 1] in index or below >> length - 1 & 1:
            return length
    return 0


_LONGEST: dict[HitPolicy, Callable[[PrefixIndex, GroupSpec, Sequence[bytes], int, int], int]] = {
    HitPolicy.ALL_PAGES: _all_pages,
    HitPolicy.TRAILING_PAGES: _trailing_pages,
    HitPolicy.EXACT_CHECKPOINT: _exact_checkpoint,
}


def longest_legal(index: PrefixIndex, spec: GroupSpec, names: Sequence[bytes], upto: int, below: int = 0) -> int:
    """The most pages, at most `upto`, that this group alone allows a prefix to have. 0 is always legal.

    below: the set of pages (bit i: page i) that lower tiers have beside the index; -1: all.
    """
    return _LONGEST[spec.policy](index, spec, names, upto, below)


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Where a group's pages are: on the device by name, and in lower tiers by number (`below`, as above)."""

    spec: GroupSpec
    index: PrefixIndex
    below: int = 0


def longest_common(groups: Sequence[GroupPages], names: Sequence[bytes], upto: int) -> int:
    """The most pages, at most `upto`, that a prefix may have with all groups: legal in each, and no multiple of any."""
    length, settled = upto, False
    while not settled:
        settled = True
        for group in groups:
            legal = longest_legal(group.index, group.spec, names, length, group.below)
            settled &= legal == length
            length = legal
    return length


def first_needed(spec: GroupSpec, length: int) -> int:
    """A hit of `length` pages uses this group's pages [first_needed, length)."""
    if spec.policy is HitPolicy.ALL_PAGES:
        return 0
    needed = spec.window_pages if spec.policy is HitPolicy.TRAILING_PAGES else 1
    return max(0, length - needed)
