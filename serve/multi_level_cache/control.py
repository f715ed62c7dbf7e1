"""What the control plane may ask of the cache manager: name -> function of keyword arguments giving plain data."""

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from serve.multi_level_cache.cache_manager import CacheManager
from serve.multi_level_cache.eviction import PageNode
from serve.types import PageContent

MAX_LISTED = 1000


def control_handlers(manager: CacheManager) -> dict[str, Callable[..., Any]]:
    """Methods for the control server."""
    return {
        "status": lambda: status(manager),
        "statistics": lambda: statistics(manager),
        "ls": lambda limit=100, root=None: list_pages(manager, limit, root),
        "check": manager.check_integrity,
        "flush": lambda root=None: flush(manager, root),
        "leaving": lambda: leaving(manager),
    }


def flush(manager: CacheManager, root: str | None = None) -> dict[str, int]:
    """Drop all pages, or those under a root (hex). lower_dropped: objects that the lower tier no longer finds."""
    tier = manager.tier
    before = tier.capacity().num_objects if tier is not None else 0
    dropped = manager.flush(_root(root))
    after = tier.capacity().num_objects if tier is not None else 0
    return {"dropped": dropped, "lower_dropped": before - after, **leaving(manager)}


def leaving(manager: CacheManager) -> dict[str, int]:
    """How many dropped objects a restart of the server could still bring back: the lower tier is deleting them."""
    return {"leaving": manager.tier.num_leaving() if manager.tier is not None else 0}


def status(manager: CacheManager) -> dict[str, Any]:
    """Whether the tiers work, and how large they are."""
    shape = manager.host.arena.shape
    data: dict[str, Any] = {
        "is_enabled": True,
        "groups": list(manager.host.formats),
        "is_ready": manager.resync.is_complete,
        "slot_bytes": shape.slot_bytes,
        "num_slots": shape.num_slots,
        "backed_slots": manager.host.pool.num_backed,
    }
    if manager.tier is not None:
        data["lower_tier"] = {"name": manager.tier.name, **vars(manager.tier.capacity())}
    return data


def statistics(manager: CacheManager) -> dict[str, Any]:
    """Counters since the start and what the tier holds now."""
    host = manager.host
    data = host.stats.as_data()
    data["slots"] = {
        "total": host.arena.shape.num_slots,
        "backed": host.pool.num_backed,
        "free": host.pool.num_free,
        "blocked": host.pool.num_blocked,
        "filling": host.directory.slots_filling,
        "pinned": host.directory.slots_pinned,
    }
    data["slot_bytes"] = host.arena.shape.slot_bytes
    data["objects"] = _objects_by_state(manager)
    data["leases"] = dict(Counter(f"{lease.kind.value}_{lease.phase.value}" for lease in host.leases))
    if manager.tier is not None:
        data["lower_tier"] = manager.tier.statistics()
    return data


def _objects_by_state(manager: CacheManager) -> dict[str, Any]:
    """Counts by content and durability; bytes and tokens of READY objects by group."""
    formats = manager.host.formats
    content: Counter[str] = Counter()
    durability: Counter[str] = Counter()
    used: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for state, count in manager.host.directory.count_objects().items():
        content[state.content.value] += count
        if state.content is PageContent.READY:
            form = formats[state.group]
            durability[state.durability.value] += count
            used[form.group] += count * form.object_bytes
            tokens[form.group] += count * form.page_tokens
    counters = {"content": content, "durability": durability, "bytes": used, "tokens": tokens}
    return {name: dict(counter) for name, counter in counters.items()}


def list_pages(manager: CacheManager, limit: int = 100, root: str | None = None) -> list[dict[str, Any]]:
    """Page names of the host, most recently used first, under one root (hex) where given."""
    wanted = _root(root)
    nodes = (node for node in manager.host.directory.nodes() if wanted is None or node.root == wanted)
    newest = heapq.nlargest(max(0, min(limit, MAX_LISTED)), nodes, key=lambda node: node.last_use)
    now = manager.host.clock()
    return [_describe(node, now) for node in newest]


def _describe(node: PageNode, now: float) -> dict[str, Any]:
    objects = [
        {
            "group": page.key.group,
            "content": page.content.value,
            "durability": page.durability.value,
            "num_pins": len(page.pins),
            "slots": list(page.slots),
        }
        for page in node.objects.values()
    ]
    names = {"name": node.name.hex(), "parent": node.parent.hex(), "root": node.root.hex()}
    return {**names, "idle_s": round(now - node.used_at, 3), "objects": objects}


def _root(root: str | None) -> bytes | None:
    """Bytes of a root in hex. Raises ValueError when it is none."""
    return bytes.fromhex(root) if root is not None else None
