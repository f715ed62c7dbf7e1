"""What somebody references on the device: pages by group, and how they stand for places of a prefix."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Holding:
    """Pages that a request, or a plan in flight, references. Only the ledger changes it.

    pages: by group, in order. ALL_PAGES: of the places from 0 on. TRAILING_PAGES: of the places from `first_places` on
    (absent: 0). EXACT_CHECKPOINT: the working page, the one that decoding refreshes, and maybe one for the prompt's
    last boundary.
    restores: by group with checkpoints, the checkpoint of the prefix that it was acquired with.
    """

    pages: dict[str, list[int]]
    first_places: dict[str, int] = field(default_factory=dict)
    restores: dict[str, int] = field(default_factory=dict)

    def first(self, group: str) -> int:
        """The place of the group's first page."""
        return self.first_places.get(group, 0)

    def end(self, group: str) -> int:
        """The place behind the group's last page."""
        return self.first_places.get(group, 0) + len(self.pages[group])

    def page_at(self, group: str, place: int) -> int:
        """The page of a place that it holds; of a group with checkpoints, the one that ends there."""
        restored = self.restores.get(group)
        return restored if restored is not None else self.pages[group][place - self.first_places.get(group, 0)]

    def references(self, group: str) -> Iterator[int]:
        """Every page of the group that it references, once for each reference."""
        if group in self.restores:
            yield self.restores[group]
        yield from self.pages[group]
