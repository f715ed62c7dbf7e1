"""What the cache tiers need before a child is spawned. Making the arena itself: see test_process_with_arena.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from models.state_layout import HitPolicy, Leaf, ShardKind, StateGroup, StateKind, StateLayout
from serve.config import ResolvedConfig, ServeConfig
from serve.errors import LaunchError
from serve.launcher.arena import arena_fds, count_tier_pages, make_arena, make_key

KIB = 1 << 10
PAGE_BYTES = 16 * KIB


def resolved(cpu_cache_bytes: int = 0, disk_cache_bytes: int = 0, disk_cache_dir: Path | None = None) -> ResolvedConfig:
    return ResolvedConfig(
        serve=ServeConfig(model="m"),
        model_path=Path("m"),
        model_name="m",
        run_dir=Path("/tmp"),
        device="cpu",
        data_type="float32",
        threads_per_worker=1,
        max_req_total_len=64,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=1,
        cpu_cache_bytes=cpu_cache_bytes,
        disk_cache_bytes=disk_cache_bytes,
        disk_cache_dir=disk_cache_dir,
    )


def model() -> Any:
    """A model whose pages of 16 tokens have `PAGE_BYTES`: 4 layers, 2 heads, keys and values of 16 dimensions."""
    leaf = Leaf("kv", tuple(range(4)), (2, 16), "float32", ShardKind.HEAD, 2)
    group = StateGroup("full", StateKind.FULL, HitPolicy.ALL_PAGES, 16, (leaf,))
    assert group.bytes_per_page == PAGE_BYTES
    layout = msgspec.to_builtins(StateLayout(16, (group,)))
    return SimpleNamespace(describe=lambda config: {"layout": layout})


def test_pages_are_counted_in_every_tier_that_is_on():
    config = resolved(cpu_cache_bytes=10 * PAGE_BYTES + 1, disk_cache_bytes=30 * PAGE_BYTES - 1)
    arena = make_arena(config, model())
    assert arena is not None
    assert count_tier_pages(arena, config, model()) == {"host": {"full": 10}, "disk": {"full": 29}}
    arena.close()
    assert count_tier_pages(None, resolved(), model()) == {}


def test_children_find_the_arena_by_name_where_there_is_one():
    arena = make_arena(resolved(cpu_cache_bytes=10 * PAGE_BYTES), model())
    assert arena is not None
    assert arena_fds(arena) == {"arena": arena.payload_fd, "arena_header": arena.header_fd}
    assert arena_fds(None) == {}
    arena.close()


def test_the_key_is_new_at_every_start_unless_a_disk_cache_keeps_it(tmp_path: Path):
    assert make_key(resolved()) != make_key(resolved())
    kept = resolved(disk_cache_dir=tmp_path / "pages")
    assert make_key(kept) == make_key(kept)


def test_a_key_that_others_can_read_ends_the_start_with_one_line(tmp_path: Path):
    kept = resolved(disk_cache_dir=tmp_path)
    make_key(kept)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(LaunchError, match="readable by others"):
        make_key(kept)
