"""The page directory: which object lies in which host slots, and in what state. Its only writer is the cache manager.

The directory keeps the invariants of bytes (a slot belongs to one object, its generation grows before each reuse, held
bytes never become EMPTY); who may claim or pin how much is decided by its callers.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from serve.multi_level_cache.eviction import EvictionView, LeafQueue, PageNode
from serve.multi_level_cache.page_state import DropReason, Holder, PageKey, PageObject
from serve.multi_level_cache.slot_pool import SlotPool
from serve.multi_level_cache.statistics import CacheStatistics
from serve.types import Durability, PageContent


class ObjectState(NamedTuple):
    """What objects are counted by."""

    group: str
    content: PageContent
    durability: Durability


class SlotHeaders(Protocol):
    """The header table beside the payload (see `host_arena`)."""

    def assign(self, slots: Sequence[int], name: bytes) -> tuple[int, ...]:
        """Bump the slots' generations, then write the name and clear the checksums; returns the new generations."""

    def clear(self, slots: Sequence[int]) -> None:
        """The slots hold nothing any more: bump the generations, so that a late reader or writer notices."""

    def generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Current generations."""


class PageDirectory:
    """Objects by (page name, group), nodes by page name, and the slots under them."""

    def __init__(
        self, pool: SlotPool, headers: SlotHeaders, clock: Callable[[], float], stats: CacheStatistics
    ) -> None:
        self.pool = pool
        self._headers = headers
        self._clock = clock
        self._stats = stats
        self._nodes: dict[bytes, PageNode] = {}
        self._num_children: Counter[bytes] = Counter()
        self._doomed: set[PageObject] = set()
        self._tick = 0
        self._slots_filling = 0
        self._slots_pinned = 0
        self._num_objects: Counter[ObjectState] = Counter()
        self._leaves = LeafQueue(
            EvictionView(self._nodes.get, self._num_children.__getitem__, self._is_idle, self._nodes.__len__)
        )

    # --- what is there ---------------------------------------------------------------------------------------------

    def find(self, key: PageKey) -> PageObject | None:
        """The object, FILLING or READY; None when the host does not have it or is about to drop it."""
        node = self._nodes.get(key.name)
        return node.objects.get(key.group) if node is not None else None

    def find_ready(self, key: PageKey) -> PageObject | None:
        """The object if its bytes are complete."""
        page = self.find(key)
        return page if page is not None and page.content is PageContent.READY else None

    def nodes(self) -> Iterator[PageNode]:
        """All page names that have objects, oldest first seen first."""
        return iter(self._nodes.values())

    def node(self, name: bytes) -> PageNode | None:
        """The node of a page name."""
        return self._nodes.get(name)

    @property
    def num_pages(self) -> int:
        """Page names with at least one object."""
        return len(self._nodes)

    def count_objects(self) -> dict[ObjectState, int]:
        """How many objects are in each state, those about to be dropped included; costs no pass over them."""
        return dict(+self._num_objects)

    @property
    def slots_filling(self) -> int:
        """Slots whose bytes are being written."""
        return self._slots_filling

    @property
    def slots_pinned(self) -> int:
        """Slots that at least one holder pins."""
        return self._slots_pinned

    def holders(self) -> Iterator[tuple[PageObject, Holder]]:
        """Every pin."""
        return ((page, holder) for page in self.pages() for holder in page.pins)

    def touch(self, names: Iterable[bytes]) -> None:
        """These pages are in use now (as far as the host has them)."""
        self._tick += 1
        now = self._clock()
        for name in names:
            node = self._nodes.get(name)
            if node is not None:
                node.last_use, node.used_at = self._tick, now

    # --- filling ---------------------------------------------------------------------------------------------------

    def make_room(self, num_slots: int, protect: Container[bytes] = ()) -> bool:
        """Evict until `num_slots` are free; evicts nothing when that takes pages of `protect` or is out of reach."""
        missing = num_slots - self.pool.num_free
        if missing <= 0:
            return True
        if missing > self.pool.num_taken - self._slots_filling - self._slots_pinned:
            return False
        victims = self._leaves.plan_victims(missing, protect)
        for node in victims or ():
            self._stats.eviction_ages.observe(self._clock() - node.used_at)
            for page in list(node.objects.values()):
                self.drop(page, DropReason.EVICTED)
        return self.pool.num_free >= num_slots

    def next_victims(self, count: int) -> list[PageNode]:
        """About so many of the nodes that `make_room` would evict first."""
        return self._leaves.next_victims(count)

    def begin_fill(self, key: PageKey, parent: bytes, root: bytes, num_slots: int) -> PageObject | None:
        """A FILLING object in fresh slots; None when fewer are free. The key must not be there."""
        slots = self.pool.take(num_slots)
        if slots is None:
            return None
        now = self._clock()
        node = self._nodes.get(key.name)
        if node is None:
            self._tick += 1
            node = self._nodes[key.name] = PageNode(key.name, parent, root, self._tick, now)
            self._num_children[parent] += 1
        if key.group in node.objects:
            raise KeyError(f"{key.group} of page {key.name.hex()} is there already")
        page = PageObject(key, slots, self._headers.assign(slots, key.name), now)
        page.move_content(PageContent.FILLING, now)
        node.objects[key.group] = page
        self._num_objects[_state(page)] += 1
        self._slots_filling += num_slots
        return page

    def publish(self, page: PageObject, durability: Durability = Durability.VOLATILE) -> bool:
        """All bytes of a FILLING object are there: READY, or EMPTY if it was doomed meanwhile (then False)."""
        if page.doomed is not None:
            self.abandon(page, page.doomed)
            return False
        self._num_objects[_state(page)] -= 1
        page.move_content(PageContent.READY, self._clock())
        if durability is not Durability.VOLATILE:
            page.move_durability(durability, self._clock())
        self._num_objects[_state(page)] += 1
        self._slots_filling -= len(page.slots)
        self._offer(page)
        return True

    def abandon(self, page: PageObject, reason: DropReason) -> None:
        """A FILLING object will not be complete: EMPTY."""
        self._slots_filling -= len(page.slots)
        self._release(page, page.doomed or reason)

    # --- READY pages -----------------------------------------------------------------------------------------------

    def pin(self, page: PageObject, holder: Holder) -> None:
        """Keep a READY page where it is until `unpin`."""
        if not page.pins:
            self._slots_pinned += len(page.slots)
        page.pin(holder)

    def unpin(self, page: PageObject, holder: Holder) -> None:
        """End a pin; the last one ends a doomed page too."""
        page.unpin(holder)
        if page.pins:
            return
        self._slots_pinned -= len(page.slots)
        if page.doomed is not None:
            self._release(page, page.doomed)
        else:
            self._offer(page)

    def set_durability(self, page: PageObject, to: Durability) -> None:
        """Tell how far a READY page has got on its way to a lower tier."""
        before = _state(page)
        page.move_durability(to, self._clock())
        self._num_objects[before] -= 1
        self._num_objects[_state(page)] += 1

    def drop(self, page: PageObject, reason: DropReason) -> None:
        """Nobody finds the page from now on; EMPTY at once, or when its pins or its filling end."""
        if page.doomed is not None:
            return
        if page.content is PageContent.READY and not page.pins:
            self._release(page, reason)
            return
        page.doomed = reason
        self._doomed.add(page)
        self._unlink(page)

    def _release(self, page: PageObject, reason: DropReason) -> None:
        before = _state(page)
        page.move_content(PageContent.EMPTY, self._clock())
        self._num_objects[before] -= 1
        self._stats.count_drop(reason)
        if page in self._doomed:
            self._doomed.discard(page)
        else:
            self._unlink(page)
        self._headers.clear(page.slots)
        self.pool.give_back(page.slots)

    def _unlink(self, page: PageObject) -> None:
        node = self._nodes[page.key.name]
        del node.objects[page.key.group]
        if node.objects:
            self._offer_node(node)
            return
        del self._nodes[node.name]
        self._num_children[node.parent] -= 1
        if not self._num_children[node.parent]:
            del self._num_children[node.parent]
            parent = self._nodes.get(node.parent)
            if parent is not None:
                self._offer_node(parent)

    def _offer(self, page: PageObject) -> None:
        self._offer_node(self._nodes[page.key.name])

    def _offer_node(self, node: PageNode) -> None:
        if not self._num_children[node.name] and self._is_idle(node):
            self._leaves.offer(node)

    @staticmethod
    def _is_idle(node: PageNode) -> bool:
        return all(page.content is PageContent.READY and not page.pins for page in node.objects.values())

    def pages(self) -> Iterator[PageObject]:
        """All objects, those about to be dropped included."""
        for node in self._nodes.values():
            yield from node.objects.values()
        yield from self._doomed

    # --- integrity -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong, one line each; empty when all is well. Costs a pass over all pages."""
        pages = list(self.pages())
        problems = self.pool.check_integrity()
        filling = sum(len(page.slots) for page in pages if page.content is PageContent.FILLING)
        ready = sum(len(page.slots) for page in pages if page.content is PageContent.READY)
        pinned = sum(len(page.slots) for page in pages if page.pins)
        usable = self.pool.num_backed - self.pool.num_blocked
        if self.pool.num_free + filling + ready != usable:
            problems.append(f"{self.pool.num_free} free + {filling} filling + {ready} ready != {usable} slots")
        if (filling, pinned) != (self._slots_filling, self._slots_pinned):
            problems.append(
                f"counts {self._slots_filling}, {self._slots_pinned} but {filling} filling, {pinned} pinned"
            )
        if Counter(map(_state, pages)) != +self._num_objects:
            problems.append("counts of objects by state differ from the objects")
        problems += [
            f"page {page.key.name.hex()} of {page.key.group}: generations differ from the header"
            for page in pages
            if self._headers.generations(page.slots) != page.generations
        ]
        if Counter(node.parent for node in self._nodes.values()) != self._num_children:
            problems.append("counts of children differ from the nodes")
        if not all(node.objects for node in self._nodes.values()):
            problems.append("a page name without objects")
        return problems


def _state(page: PageObject) -> ObjectState:
    return ObjectState(page.key.group, page.content, page.durability)
