"""Which pages go when room is needed: least recently used first, leaves first, exactly the slots wanted or none.

All objects of one page name (its groups) go together, and never before the pages that continue it, because those are
of no use without it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass

from serve.multi_level_cache.page_state import PageObject

MIN_CLEANED = 64  # entries; fewer are not worth a pass over them


class PageNode:
    """A page name with the objects that the host has of it, linked to its parent by name.

    last_use: tick of the directory at the last touch (the order of LRU); used_at: the same as a time. rescued_use:
    last_use when it was last offered to a lower tier because it was about to go.
    """

    __slots__ = ("last_use", "name", "objects", "parent", "queued", "rescued_use", "root", "used_at")

    def __init__(self, name: bytes, parent: bytes, root: bytes, last_use: int, used_at: float) -> None:
        self.name = name
        self.parent = parent
        self.root = root
        self.objects: dict[str, PageObject] = {}
        self.last_use = last_use
        self.used_at = used_at
        self.rescued_use: int | None = None
        self.queued = False

    @property
    def num_slots(self) -> int:
        return sum(len(page.slots) for page in self.objects.values())


@dataclass(frozen=True)
class EvictionView:
    """What the queue asks the directory. find: node by name; num_children: resident pages that continue a name.

    num_nodes: all that are resident.
    """

    find: Callable[[bytes], PageNode | None]
    num_children: Callable[[bytes], int]
    is_idle: Callable[[PageNode], bool]
    num_nodes: Callable[[], int]


class LeafQueue:
    """Nodes that were seen evictable, oldest first. Entries are checked when they are taken, not when things change.

    Each queued node has one entry; one that was used since goes back with its new tick. Nodes that left in another way
    than by eviction are thrown out when they are more than those that are resident.
    """

    def __init__(self, view: EvictionView) -> None:
        self._view = view
        self._heap: list[tuple[int, int, PageNode]] = []
        self._sequence = 0

    def offer(self, node: PageNode) -> None:
        """The node may be evictable now."""
        if not node.queued:
            node.queued = True
            self._sequence += 1
            heapq.heappush(self._heap, (node.last_use, self._sequence, node))
            if len(self._heap) > MIN_CLEANED and len(self._heap) > 2 * self._view.num_nodes():
                self._forget_gone()

    def _forget_gone(self) -> None:
        self._heap = [entry for entry in self._heap if self._view.find(entry[2].name) is entry[2]]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def plan_victims(self, num_slots: int, protect: Container[bytes]) -> list[PageNode] | None:
        """Nodes to evict, children before parents, that free at least `num_slots`; None when there are not enough."""
        victims: list[PageNode] = []
        spared: list[PageNode] = []
        gone: Counter[bytes] = Counter()  # children that the plan evicts, by parent
        num_freed = 0
        while num_freed < num_slots and (node := self._pop(gone)) is not None:
            if node.name in protect:
                spared.append(node)
                continue
            victims.append(node)
            num_freed += node.num_slots
            gone[node.parent] += 1
            parent = self._view.find(node.parent)
            if parent is not None and self._is_evictable(parent, gone):
                self.offer(parent)
        for node in spared if num_freed >= num_slots else spared + victims:
            self.offer(node)
        return victims if num_freed >= num_slots else None

    def next_victims(self, count: int) -> list[PageNode]:
        """About `count` nodes that go next, each followed by those above it that nobody has used later."""
        leaves: list[PageNode] = []
        while len(leaves) < count and (leaf := self._pop(Counter())) is not None:
            leaves.append(leaf)
        found: dict[bytes, PageNode] = {}
        for leaf in leaves:
            self.offer(leaf)
            node: PageNode | None = leaf
            while node is not None and node.last_use <= leaf.last_use and len(found) < count:
                found[node.name] = node
                node = self._view.find(node.parent)
        return list(found.values())

    def _pop(self, gone: Counter[bytes]) -> PageNode | None:
        while self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not self._is_evictable(node, gone):
                continue
            if node.last_use == last_use:
                return node
            self.offer(node)
        return None

    def _is_evictable(self, node: PageNode, gone: Counter[bytes]) -> bool:
        view = self._view
        is_resident = view.find(node.name) is node
        return is_resident and view.is_idle(node) and view.num_children(node.name) == gone[node.name]
