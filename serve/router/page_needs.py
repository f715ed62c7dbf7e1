"""How many pages of each state group a request needs: to join the batch, and later."""

from collections.abc import Mapping, Sequence

from serve.router.admission import Admission
from serve.router.prefix_index import GroupSpec
from serve.router.request import Request

# Of a group with checkpoints a running request has a working page and one that decoding refreshes; they stand in this
# order in its holding, before the page for the prompt's last boundary.
WORKING, REFRESHED = 0, 1
_NUM_FIXED = 2


def fewest_pages(spec: GroupSpec) -> int:
    """Pages that a group's pool must have so that one request of any length can always go on.

    Window: the window, the page that is written and the next one, since the oldest comes back one plan late.
    Checkpoints: what a request takes, beside the checkpoint that it begins with.
    """
    if spec.has_window:
        return spec.window_pages + 2
    return _NUM_FIXED + 2 if spec.has_checkpoints else 1


class PageNeeds:
    """From tokens to pages, by group.

    FULL: at the door pages for all known tokens, then as many as the output is expected to take. Window: at the door
    those of the first chunk; in all a window, and the chunks of the two plans that may be in flight. Checkpoints: a
    fixed number at the door, nothing later.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        num_pages: Mapping[str, int],
        page_size: int,
        chunk_tokens: int,
        admission: Admission,
    ) -> None:
        self._specs = specs
        self._num_pages = num_pages
        self._page_size = page_size
        self._chunk_pages = -(-chunk_tokens // page_size) + 1  # a chunk may begin and end within a page
        self._admission = admission
        self._windows = [spec for spec in specs if spec.has_window]

    def joining(self, request: Request, length: int) -> dict[str, int]:
        """Pages to take when it joins behind a cached prefix of `length` pages."""
        return {spec.name: self._joining(spec, request, length) for spec in self._specs}

    def growth(self, request: Request, length: int) -> dict[str, int]:
        """Pages that it is expected to ask for after it has joined so."""
        grown = self._admission.expected_growth(request)
        return {spec.name: self._growth(spec, request, length, grown) for spec in self._specs}

    def in_all(self, request: Request, length: int) -> dict[str, int]:
        """Pages that it is expected to have at most, the prefix included."""
        grown = self._admission.expected_growth(request)
        return {
            spec.name: self.prefix(spec, length)
            + self._joining(spec, request, length)
            + self._growth(spec, request, length, grown)
            for spec in self._specs
        }

    @staticmethod
    def prefix(spec: GroupSpec, length: int) -> int:
        """Pages of which a cached prefix of `length` pages is made."""
        if spec.is_full:
            return length
        return min(length, spec.window_pages if spec.has_window else 1)

    def first_stop(self, request: Request, length: int) -> int:
        """Tokens up to which the first chunk has pages."""
        places = min((length + self._joining(spec, request, length) for spec in self._windows), default=None)
        return request.num_tokens if places is None else min(request.num_tokens, places * self._page_size)

    def window_peak(self, spec: GroupSpec) -> int:
        """Most pages of a group with a window that a prefilling request may want at a time."""
        return min(self._num_pages[spec.name], spec.window_pages + 2 * self._chunk_pages + 1)

    def _joining(self, spec: GroupSpec, request: Request, length: int) -> int:
        if spec.has_checkpoints:
            return _NUM_FIXED + ((request.num_tokens - 1) // self._page_size > length)
        missing = self._admission.pages_for(request.num_tokens) - length
        if spec.is_full:
            return missing
        return min(missing, self._chunk_pages, self.window_peak(spec) - self.prefix(spec, length))

    def _growth(self, spec: GroupSpec, request: Request, length: int, grown: int) -> int:
        if spec.is_full:
            return grown
        if spec.has_checkpoints:
            return 0
        joining, prefix = self._joining(spec, request, length), self.prefix(spec, length)
        wanted = prefix + self._admission.pages_for(request.num_tokens) - length + grown
        return max(0, min(self.window_peak(spec), wanted) - prefix - joining)


class ExpectedGrowth:
    """Owner of `Request.growth`, and of its sum over the batch: pages by group that running requests may ask for."""

    def __init__(self, groups: Sequence[str]) -> None:
        self.total = dict.fromkeys(groups, 0)

    def begin(self, request: Request, growth: Mapping[str, int]) -> None:
        """The request has joined."""
        request.growth = dict(growth)
        for group, count in growth.items():
            self.total[group] += count

    def spend(self, request: Request, group: str, count: int) -> None:
        """It got pages."""
        spent = min(count, request.growth.get(group, 0))
        if spent:
            request.growth[group] -= spent
            self.total[group] -= spent

    def change(self, request: Request, group: str, to: int) -> None:
        """It is expected to ask for so many from now on."""
        self.total[group] += to - request.growth[group]
        request.growth[group] = to

    def end(self, request: Request) -> None:
        """It leaves the batch."""
        for group, count in request.growth.items():
            self.total[group] -= count
        request.growth = {}
