"""What the cache tiers need before any child is spawned: the arena, which outlives all of them, and the key."""

import secrets

import msgspec

from models.state_layout import StateLayout
from serve.config import ResolvedConfig
from serve.errors import LaunchError
from serve.launcher.model_facts import ModelFacts
from serve.multi_level_cache.disk_directory import KEY_BYTES, DiskDirectoryError, load_or_create_key
from serve.multi_level_cache.host_arena import ArenaSizeError, HostArena, arena_shape
from serve.multi_level_cache.object_format import object_formats


def make_arena(config: ResolvedConfig, model: ModelFacts) -> HostArena | None:
    """The arena's segments, without memory yet; None when the CPU cache is off. Raises LaunchError."""
    if not config.cpu_cache_bytes:
        return None
    layout = msgspec.convert(model.describe(config)["layout"], StateLayout)
    try:
        return HostArena.create(arena_shape(object_formats(layout), config.cpu_cache_bytes))
    except (ArenaSizeError, ValueError, OSError) as error:
        raise LaunchError(f"the CPU cache cannot be made: {error}") from error


def count_host_pages(arena: HostArena | None, config: ResolvedConfig, model: ModelFacts) -> dict[str, int]:
    """Pages by group that the full-grown arena holds when each page is stored with its objects of all groups."""
    if arena is None:
        return {}
    formats = object_formats(msgspec.convert(model.describe(config)["layout"], StateLayout))
    together = sum(form.num_slots(arena.shape.slot_bytes) for form in formats)
    return {form.group: arena.shape.num_slots // together for form in formats}


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
