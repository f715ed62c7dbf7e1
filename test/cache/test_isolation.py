"""Prompts share pages only within one salt, model, data type and page size."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import CacheServer, TinyModel, make_prompt, usable

from serve.cache_operations import ask_in, flush

SALTS: list[dict[str, str]] = [{}, {"cache_salt": ""}, {"cache_salt": "one"}, {"cache_salt": "two"}]
PROMPT = make_prompt(16 * 6 + 5, "isolation")
REPEATS = 4


def test_salts_share_no_page_in_any_tier(start_tiers: Callable[..., Any], tmp_path: Path):
    with start_tiers(disk=tmp_path / "pages") as server:
        for salt in SALTS:
            assert server.check(PROMPT, **salt).cached == 0, salt
            assert server.check(PROMPT, **salt).device == usable(PROMPT)
            server.flush_device()
        assert {hit_of(server, "host", **salt) for salt in SALTS} == {usable(PROMPT)}
        flush(ask_in(server.server.run_dir), "two")
        assert [server.check(PROMPT, **salt).device for salt in SALTS] == [usable(PROMPT)] * 3 + [0]
        server.settle()
    with start_tiers(disk=tmp_path / "pages") as server:
        for salt in SALTS:
            assert hit_of(server, "disk", **salt) == usable(PROMPT), salt


def hit_of(server: CacheServer, tier: str, **salt: str) -> int:
    """Of the first answer that is served by the tiers below the device, tokens of one tier."""
    for _ in range(REPEATS):
        answer = server.check(PROMPT, **salt)
        if answer.host or answer.disk:
            return int(getattr(answer, tier))
        server.flush_device()
    return 0


def test_other_models_types_and_page_sizes_share_no_page(
    start_tiers: Callable[..., Any], tiny: TinyModel, tmp_path: Path
):
    """One directory, one server after the other; the first finds its pages again at the end."""
    disk = tmp_path / "pages"
    with start_tiers(disk=disk) as server:
        assert server.check(PROMPT).cached == 0
        server.settle()
        # A second one at the same time is refused with one line.
        with pytest.raises(pytest.fail.Exception, match="is used by another server"), contextlib.ExitStack() as stack:
            stack.enter_context(start_tiers(disk=disk))
        assert server.check(PROMPT).device == usable(PROMPT)
    (tmp_path / "other").mkdir()
    other = TinyModel(tmp_path / "other", scale=1.5)
    assert other.text(PROMPT) != tiny.text(PROMPT)
    with start_tiers(disk=disk, model=other) as server:
        assert server.check(PROMPT).cached == 0
        server.settle()
    for flags in (("--data_type", "bfloat16"), ("--cpu_cache_token_page_size", "32")):
        with start_tiers(*flags, disk=disk) as server:
            assert server.ask(PROMPT).cached == 0, flags
            server.settle()
    with start_tiers(disk=disk) as server:
        assert hit_of(server, "disk") == usable(PROMPT)
