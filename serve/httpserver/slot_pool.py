"""The request slots that one HTTP process owns."""

from collections.abc import Iterable
from typing import Protocol


class SlotState(Protocol):
    """What the pool asks of the request table."""

    def is_free(self, slot: int) -> bool: ...

    def generation(self, slot: int) -> int: ...


class SlotPool:
    """Hands out free slots of a range. The table says which are free; the pool only saves the search.

    The slot freed last is taken first, so that only as many slots as run at once ever become memory.
    """

    def __init__(self, table: SlotState, owned: range) -> None:
        self._table = table
        self._owned = owned
        self._taken: set[int] = set()
        self._free: list[int] = []
        self.rescan()

    @property
    def num_owned(self) -> int:
        """Slots in the range."""
        return len(self._owned)

    @property
    def num_free(self) -> int:
        """Slots that can be taken at once."""
        return len(self._free)

    def rescan(self) -> None:
        """Find the free slots from the table alone."""
        owned = reversed(self._owned)
        self._free = [slot for slot in owned if slot not in self._taken and self._table.is_free(slot)]

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None and no change."""
        if len(self._free) < count:
            self.rescan()
        if len(self._free) < count:
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._taken.update(slots)
        return slots

    def put_back(self, slot: int) -> None:
        """A slot that was taken but never submitted."""
        if slot in self._taken:
            self._taken.discard(slot)
            self._free.append(slot)

    def let_go(self, slot: int) -> None:
        """This process is done with a submitted slot; it becomes free when the router releases it."""
        self._taken.discard(slot)

    def released(self, slots: Iterable[tuple[int, int]]) -> None:
        """The router released (slot, generation)s."""
        for slot, generation in slots:
            is_ours = slot in self._owned and self._table.generation(slot) == generation
            if is_ours and slot not in self._taken and slot not in self._free and self._table.is_free(slot):
                self._free.append(slot)
