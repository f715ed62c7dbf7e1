"""Pages of one state group: free list, reference counts, prefix index, and idle cached pages in order of last use."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from serve.router.prefix_index import GroupSpec, PrefixIndex


class GroupLedger:
    """The only writer of one group's page states.

    A page is free (no name, no reference), used (referenced), or idle (named, not referenced). Idle pages are kept
    oldest use first; because holders release their deepest page first, a child stands before its parent.
    """

    def __init__(self, spec: GroupSpec, num_pages: int) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self.index = PrefixIndex()
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Idle pages: named, and evicted when room is needed."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def room(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def refs(self, page: int) -> int:
        """How many holders and jobs reference the page."""
        return self._refs[page]

    def take(self, count: int) -> list[int]:
        """`count` <= room fresh pages with one reference each; evicts exactly as many idle pages as are missing."""
        for _ in range(count - len(self._free)):
            page, _unused = self._idle.popitem(last=False)
            self.index.remove(page)
            self._free.append(page)
            self.num_evicted += 1
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def ref(self, pages: Iterable[int]) -> None:
        """Reference pages that are used or idle."""
        for page in pages:
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def unref(self, pages: Sequence[int]) -> None:
        """Drop one reference of each, the last of the sequence (the deepest) first."""
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self.index.name(page) is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def forget(self, page: int) -> None:
        """Take a page out of the index, whoever references it."""
        if self.index.name(page) is None:
            return
        self.index.remove(page)
        if self._refs[page] == 0:
            del self._idle[page]
            self._free.append(page)

    def flush(self, root: bytes | None = None) -> int:
        """Take all pages, or those under a root, out of the index, and free the idle ones; returns how many."""
        before = len(self._idle)
        for page in self.index.pages_of(root):
            self.forget(page)
        return before - len(self._idle)

    def check_integrity(self, held: dict[int, int]) -> list[str]:
        """Problems found, given how many holders and jobs name each page."""
        problems = self.index.check_integrity()
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free) or free & idle:
            problems.append("a page is free twice, or free and idle")
        for page, refs in enumerate(self._refs):
            if refs != held.get(page, 0):
                problems.append(f"page {page} has {refs} references but {held.get(page, 0)} holders")
            named = self.index.name(page) is not None
            if (page in free) != (refs == 0 and not named) or (page in idle) != (refs == 0 and named):
                problems.append(f"page {page}: refs {refs}, named {named}, free {page in free}, idle {page in idle}")
        if self.num_free + self.num_used + self.num_cached != self.num_pages:
            problems.append("free + used + cached is not the total")
        return [f"group {self.spec.name}: {problem}" for problem in problems]
