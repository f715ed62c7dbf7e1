"""What the router is told at its start and when the engine is up, as plain frozen values."""

from dataclasses import dataclass, field
from typing import Any

from models.state_layout import HitPolicy, StateKind
from serve.hashing import PageHasher
from serve.ipc.child import StartError
from serve.router.cache_client import ProbePolicy
from serve.router.cost_model import CostPrior
from serve.router.page_needs import fewest_pages
from serve.router.prefix_index import GroupSpec


@dataclass(frozen=True)
class RouterSettings:
    """Limits and deadlines that hold from the start. max_rows: requests in the batch at most.

    num_servers: HTTP processes, which share the table's slots. num_layers: of the model. max_loading_fraction: of a
    pool, in pages that are being loaded. stores_output: generated pages go to the host too. loads_always: loads are
    not weighed against recomputing. cache_is_sync: a step waits for the jobs that have begun. checkpoint_interval:
    tokens of a prompt between two checkpoints of states that exist for one boundary only.
    """

    epoch: int
    page_size: int
    num_ranks: int
    max_rows: int
    batch_max_tokens: int
    chunked_prefill_size: int
    max_total_len: int
    max_queue_size: int
    request_timeout_s: float
    step_timeout_s: float
    by_priority: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    num_servers: int = 1
    num_layers: int = 0
    max_loading_fraction: float = 0.5
    stores_output: bool = False
    cache_is_sync: bool = False
    loads_always: bool = False
    checkpoint_interval: int = 2048
    probe: ProbePolicy = field(default_factory=ProbePolicy)


@dataclass(frozen=True)
class EngineFacts:
    """What only a running engine knows: pages by group, how pages are named, what its start-up probe measured.

    page_bytes: by group, bytes of a page on all ranks together; 0: its pages are never transferred.
    """

    specs: tuple[GroupSpec, ...]
    num_pages: dict[str, int]
    hasher: PageHasher
    prior: CostPrior
    page_bytes: dict[str, int]

    @classmethod
    def from_info(cls, info: dict[str, Any], page_size: int) -> "EngineFacts":
        """From `EngineUp.info`; raises StartError for what the router cannot run.

        Keys: namespace, key (hex), num_pages {group: n}, groups [{"name", "kind", "hit_policy", "window_tokens",
        "bytes_per_page"}] (absent: all are FULL), prior: fields of `CostPrior` (optional).
        """
        num_pages = {str(group): int(count) for group, count in info["num_pages"].items()}
        specs = tuple(_spec(group, page_size) for group in info.get("groups", ()))
        specs = specs or tuple(GroupSpec(group) for group in num_pages)
        for spec in specs:
            if num_pages.get(spec.name, 0) < fewest_pages(spec):
                raise StartError(
                    f"state group {spec.name} has {num_pages.get(spec.name, 0)} pages in the device pool and needs "
                    f"{fewest_pages(spec)} at least; give more memory with --max_total_token_num or --mem_fraction"
                )
        key, namespace = bytes.fromhex(info["key"]), bytes.fromhex(info["namespace"])
        sizes = {str(group["name"]): int(group.get("bytes_per_page", 1)) for group in info.get("groups", ())}
        page_bytes = {spec.name: sizes.get(spec.name, 1) for spec in specs}
        hasher, prior = PageHasher(key, namespace, page_size), CostPrior(**(info.get("prior") or {}))
        return cls(specs, num_pages, hasher, prior, page_bytes)


def _spec(group: dict[str, Any], page_size: int) -> GroupSpec:
    policy = HitPolicy(group.get("hit_policy", HitPolicy.ALL_PAGES.value))
    if StateKind(group.get("kind", StateKind.FULL.value)) is StateKind.FULL and policy is not HitPolicy.ALL_PAGES:
        raise StartError(f"state group {group['name']} is FULL but its hit policy is {policy.value}")
    return GroupSpec(str(group["name"]), policy, -(-int(group.get("window_tokens", 0)) // page_size))
