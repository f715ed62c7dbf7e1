"""Which host slots are free. A slot is in exactly one place: unbacked, free, blocked, or with an object.

Blocked slots are free of objects but may still be touched by a job that the manager no longer counts on (one that
began after its claim had expired, or one from before the manager's restart): they come back when those jobs have ended.
"""

from collections.abc import Hashable, Iterable

from serve.multi_level_cache.page_state import IllegalMoveError


class SlotPool:
    """Free slots, lowest first where possible, so that objects taken together lie together."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_backed = 0
        self._free: list[int] = []  # used from the end
        self._taken: set[int] = set()
        self._blocks: dict[int, set[Hashable]] = {}  # slot -> jobs that may still touch it
        self._blocked: set[int] = set()  # slots that are out of use because of a block

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def num_blocked(self) -> int:
        return len(self._blocked)

    def grow(self, num_backed: int) -> None:
        """Slots [0, num_backed) have memory now."""
        if not self.num_backed <= num_backed <= self.num_slots:
            raise IllegalMoveError(f"{num_backed} slots after {self.num_backed} of {self.num_slots}")
        fresh = range(self.num_backed, num_backed)
        self._blocked.update(slot for slot in fresh if slot in self._blocks)
        self._free = [slot for slot in reversed(fresh) if slot not in self._blocks] + self._free
        self.num_backed = num_backed

    def take(self, count: int) -> tuple[int, ...] | None:
        """Exactly `count` slots, or None."""
        if count > len(self._free):
            return None
        slots = tuple(self._free.pop() for _ in range(count))
        self._taken.update(slots)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """The object that lay in these slots is gone."""
        for slot in sorted(slots, reverse=True):
            if slot not in self._taken:
                raise IllegalMoveError(f"slot {slot} given back but not taken")
            self._taken.discard(slot)
            if slot in self._blocks:
                self._blocked.add(slot)
            else:
                self._free.append(slot)

    def block(self, slots: Iterable[int], job: Hashable) -> None:
        """Keep slots out of use until `unblock(job)`; those with an object now, from when they are given back."""
        wanted = set(slots)
        for slot in wanted:
            self._blocks.setdefault(slot, set()).add(job)
        self._blocked |= wanted.intersection(self._free)
        self._free = [slot for slot in self._free if slot not in wanted]

    def unblock(self, job: Hashable) -> None:
        """The job has ended: it touches nothing any more."""
        for slot in [slot for slot, jobs in self._blocks.items() if job in jobs]:
            self._blocks[slot].discard(job)
            if not self._blocks[slot]:
                del self._blocks[slot]
                if slot in self._blocked:
                    self._blocked.discard(slot)
                    self._free.append(slot)

    def check_integrity(self) -> list[str]:
        """Every backed slot is in exactly one place; returns what is wrong."""
        places = [*self._free, *self._taken, *self._blocked]
        if sorted(places) != list(range(self.num_backed)):
            counts = f"{len(self._free)} free + {len(self._taken)} taken + {len(self._blocked)} blocked"
            return [f"{counts} slots of {self.num_backed}"]
        if not self._blocked <= self._blocks.keys():
            return ["blocked slots without a job"]
        return []
