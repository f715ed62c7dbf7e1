"""What the cache tiers need before any child is spawned: the arena, which outlives all of them, and the key."""

import secrets

import msgspec

from models.state_layout import StateLayout
from serve.config import ResolvedConfig
from serve.errors import LaunchError
from serve.launcher.model_facts import ModelFacts
from serve.launcher.start_summary import TierPages
from serve.multi_level_cache.disk_directory import KEY_BYTES, DiskDirectoryError, load_or_create_key
from serve.multi_level_cache.disk_io import aligned
from serve.multi_level_cache.host_arena import ArenaSizeError, HostArena, arena_shape
from serve.multi_level_cache.object_format import ObjectFormat, object_formats


def make_arena(config: ResolvedConfig, model: ModelFacts) -> HostArena | None:
    """The arena's segments, without memory yet; None when the CPU cache is off. Raises LaunchError."""
    if not config.cpu_cache_bytes:
        return None
    try:
        return HostArena.create(arena_shape(_formats(config, model), config.cpu_cache_bytes))
    except (ArenaSizeError, ValueError, OSError) as error:
        raise LaunchError(f"the CPU cache cannot be made: {error}") from error


def _formats(config: ResolvedConfig, model: ModelFacts) -> tuple[ObjectFormat, ...]:
    return object_formats(msgspec.convert(model.describe(config)["layout"], StateLayout))


def count_tier_pages(arena: HostArena | None, config: ResolvedConfig, model: ModelFacts) -> TierPages:
    """What the full-grown tiers hold when each page is stored with its objects of all groups; of disk, about that."""
    if arena is None:
        return {}
    formats = _formats(config, model)
    slots_a_page = sum(form.num_slots(arena.shape.slot_bytes) for form in formats)
    disk_bytes_a_page = sum(aligned(form.object_bytes) for form in formats)
    pages = {
        "host": arena.shape.num_slots // slots_a_page,
        "disk": config.disk_cache_bytes // disk_bytes_a_page,
    }
    return {tier: {form.group: count for form in formats} for tier, count in pages.items()}


def arena_fds(arena: HostArena | None) -> dict[str, int]:
    """Descriptors by the names under which children find them."""
    return {} if arena is None else {"arena": arena.payload_fd, "arena_header": arena.header_fd}


def make_key(config: ResolvedConfig) -> bytes:
    """The key of page names: the disk cache's own, so that its pages are found again, or random. Raises LaunchError."""
    if config.disk_cache_dir is None:
        return secrets.token_bytes(KEY_BYTES)
    try:
        return load_or_create_key(config.disk_cache_dir)
    except DiskDirectoryError as error:
        raise LaunchError(str(error)) from error
