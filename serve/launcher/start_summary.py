"""What the launcher prints once when the server answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from models.state_layout import HitPolicy
from serve.config import ResolvedConfig
from serve.launcher.child_process import ChildProcess
from serve.launcher.engine_info import EngineFacts
from serve.launcher.model_facts import GroupFacts
from serve.units import format_bytes

TierPages = Mapping[str, Mapping[str, int]]
"""Pages by tier ("host", "disk") and state group; a tier that is off is missing."""


def format_summary(
    config: ResolvedConfig,
    facts: EngineFacts,
    workers: Sequence[ChildProcess],
    tier_pages: TierPages,
    phases: dict[str, float],
    url: str,
) -> str:
    """Model, URL, state groups with pages and tokens of each tier, memory plan, time by phase (seconds)."""
    lines = [
        f"Varve serves {config.model_name} at {url}",
        f"  model    {config.model_path}, {config.data_type} on {config.device}, tp {config.serve.tp}, "
        f"{config.threads_per_worker} threads a worker",
        f"  limits   {facts.max_req_total_len} tokens a request, {config.serve.running_max_req_size} running, "
        f"{config.serve.max_queue_size} waiting, {config.batch_max_tokens} tokens a step",
    ]
    for group in facts.groups:
        device = _format_tier("device", group, facts.num_pages[group.name])
        lower = (_format_tier(tier, group, tier_pages.get(tier, {}).get(group.name, 0)) for tier in ("host", "disk"))
        what = "a checkpoint" if _has_checkpoints(group) else f"a page of {group.page_tokens} tokens"
        lines.append(
            f"  state    {group.name} ({group.kind}): {format_bytes(group.bytes_per_page)} {what}; "
            f"{'; '.join((device, *lower))}"
        )
    if facts.copy_bytes_per_s:
        speeds = (f"{name} {format_bytes(speed)}/s" for name, speed in facts.copy_bytes_per_s.items())
        lines.append(f"  copies   {', '.join(speeds)}")
    lines += [f"  memory   {worker.name}: {_format_memory(worker)}" for worker in workers if worker.info.get("memory")]
    lines.append(f"  start    {', '.join(f'{name} {seconds:.1f} s' for name, seconds in phases.items())}")
    return "\n".join(lines)


def _format_tier(tier: str, group: GroupFacts, num_pages: int) -> str:
    if not num_pages:
        return f"{tier} 0 pages"
    if _has_checkpoints(group):
        return f"{tier} {num_pages} checkpoints, {format_bytes(num_pages * group.bytes_per_page)}"
    return (
        f"{tier} {num_pages} pages, {num_pages * group.page_tokens} tokens, "
        f"{format_bytes(num_pages * group.bytes_per_page)}"
    )


def _has_checkpoints(group: GroupFacts) -> bool:
    return group.hit_policy == HitPolicy.EXACT_CHECKPOINT.value


def worker_phases(workers: Sequence[ChildProcess]) -> dict[str, float]:
    """The slowest rank's seconds of each phase that the workers measured."""
    slowest: dict[str, float] = {}
    for worker in workers:
        for name, seconds in _numbers(worker.info.get("phases")).items():
            slowest[name] = max(seconds, slowest.get(name, 0.0))
    return slowest


def _format_memory(worker: ChildProcess) -> str:
    """Counts (`num_*`) as they are, everything else as bytes."""
    parts = []
    for name, value in _numbers(worker.info.get("memory")).items():
        is_count = name.startswith("num_")
        parts.append(f"{name.removeprefix('num_')} {value:.0f}" if is_count else _format_size(name, value))
    return ", ".join(parts)


def _format_size(name: str, size: float) -> str:
    return f"{name.removesuffix('_bytes')} {format_bytes(size)}"


def _numbers(section: Any) -> dict[str, float]:
    items = section.items() if isinstance(section, dict) else ()
    return {str(name): float(value) for name, value in items if isinstance(value, int | float)}
