"""What EngineUp tells: made from what the ranks answered."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from serve.config import ResolvedConfig
from serve.errors import LaunchError
from serve.launcher.child_process import ChildProcess
from serve.launcher.model_facts import GroupFacts, ModelFacts


@dataclass(frozen=True)
class EngineFacts:
    """What the ranks agree on.

    num_pages: by group, the minimum over ranks. max_req_total_len: tokens of the longest request that fits the pool.
    copy_bytes_per_s: bytes of whole pages by direction ("load", "store") on the slowest rank; empty: no host tier.
    """

    namespace: bytes
    groups: list[GroupFacts]
    num_pages: dict[str, int]
    max_req_total_len: int
    copy_bytes_per_s: dict[str, float]


def merge_answers(config: ResolvedConfig, model: ModelFacts, workers: Sequence[ChildProcess]) -> EngineFacts:
    """Merge the workers' ChildReady.info. Raises LaunchError when they do not make one engine."""
    groups = model.groups(config)
    num_pages = merge_page_counts(groups, workers)
    return EngineFacts(
        namespace=model.namespace(config, merge_digests(workers)),
        groups=groups,
        num_pages=num_pages,
        max_req_total_len=fit_length_limit(config, groups, num_pages),
        copy_bytes_per_s=merge_copy_speeds(workers),
    )


def engine_up_info(config: ResolvedConfig, model: ModelFacts, facts: EngineFacts, key: bytes) -> dict[str, Any]:
    """EngineUp.info; see docs/architecture.md."""
    return {
        "namespace": facts.namespace.hex(),
        "key": key.hex(),
        "page_size": config.page_size,
        "groups": [asdict(group) for group in facts.groups],
        "num_pages": facts.num_pages,
        "max_req_total_len": facts.max_req_total_len,
        "copy_bytes_per_s": facts.copy_bytes_per_s,
        "prior": {f"{name}_bytes_per_s": speed for name, speed in facts.copy_bytes_per_s.items() if name == "load"},
        "model": model.describe(config)["config"],
    }


def merge_page_counts(groups: list[GroupFacts], workers: Sequence[ChildProcess]) -> dict[str, int]:
    """Pages by group that every rank has."""
    counts = {}
    for group in groups:
        by_rank = [_section(worker, "num_pages").get(group.name) for worker in workers]
        if not by_rank or any(not isinstance(count, int) or count < 1 for count in by_rank):
            raise LaunchError(f"state group {group.name!r} has no pages on some rank: {by_rank}")
        counts[group.name] = min(cast(list[int], by_rank))
    return counts


def merge_copy_speeds(workers: Sequence[ChildProcess]) -> dict[str, float]:
    """By direction, what every rank keeps up with: a page has moved when all ranks have moved their parts."""
    merged: dict[str, float] = {}
    for worker in workers:
        for name, speed in _section(worker, "copy_bytes_per_s").items():
            merged[str(name)] = min(float(speed), merged.get(str(name), math.inf))
    return merged


def merge_digests(workers: Sequence[ChildProcess]) -> dict[int, bytes]:
    """Block digests of all ranks; two ranks may have hashed the same block, to the same digest."""
    merged: dict[int, bytes] = {}
    for worker in workers:
        for index, digest in _section(worker, "block_digests").items():
            content = bytes.fromhex(str(digest))
            if merged.setdefault(int(index), content) != content:
                raise LaunchError(f"{worker.name} read other weights than its peers (block {index})")
    return merged


def fit_length_limit(config: ResolvedConfig, groups: list[GroupFacts], num_pages: dict[str, int]) -> int:
    """The longest request that the pool can hold, so that one request can always run to its end."""
    grows = [group for group in groups if group.kind == "full"]
    pool = min((num_pages[group.name] * group.page_tokens for group in grows), default=config.max_req_total_len)
    if config.serve.max_req_total_len is not None and config.max_req_total_len > pool:
        raise LaunchError(
            f"--max_req_total_len {config.max_req_total_len} does not fit the device pool of {pool} tokens; "
            "lower it, or give more memory with --max_total_token_num or --mem_fraction"
        )
    return min(config.max_req_total_len, pool)


def _section(worker: ChildProcess, name: str) -> dict[Any, Any]:
    section = worker.info.get(name, {})
    if not isinstance(section, dict):
        raise LaunchError(f"{worker.name} answered with a {name} that is a {type(section).__name__}")
    return section
