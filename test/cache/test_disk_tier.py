"""The disk tier through the whole engine, in float32, over stops, kills, other TP sizes and damage."""

import contextlib
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tiny_engine import BOUNDARY_LENGTHS, PAGE, CacheServer, Load, Tokens, make_prompt, make_trees, usable

Start = Callable[..., contextlib.AbstractContextManager[CacheServer]]
SLOT = 8192
LATE_POLICY = ("--disk_cache_policy", "after_hits", "--disk_cache_min_tokens", str(5 * PAGE))
REASONS = ("no_hit", "short_prompt")


def boundary_prompts() -> list[Tokens]:
    return [make_prompt(length, ("boundary", length)) for length in BOUNDARY_LENGTHS]


def disk_tokens(server: CacheServer, prompts: list[Tokens], attempts: int = 4) -> list[int]:
    """Tokens of each that came from disk, the first time that a load paid."""
    found = [0] * len(prompts)
    for _ in range(attempts):
        left = [index for index, prompt in enumerate(prompts) if not found[index] and usable(prompt)]
        for index in left:
            answer = server.check(prompts[index])
            found[index] = answer.disk + answer.host  # the host has what an earlier attempt promoted
        server.flush_device()
    return found


def kill_all(server: CacheServer) -> None:
    """SIGKILL to every process at once."""
    processes = [psutil.Process(server.server.process.pid), *server.server.children()]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    server.server.process.wait(10)
    psutil.wait_procs(processes, 5)
    shutil.rmtree(server.server.run_dir)  # what only a launcher that lives can do


def three_turns(server: CacheServer, seed: str) -> tuple[Tokens, int]:
    """A conversation's history, and where the prompt of its third turn ends: that much is stored."""
    history: Tokens = []
    for turn in range(3):
        history += make_prompt(40, (seed, turn))
        end_of_prompt = len(history)
        history += server.check(history, 24).tokens
    return history, end_of_prompt


def check_fourth_turn(server: CacheServer, history: Tokens, end_of_prompt: int) -> None:
    """The three prompts come from disk; before it, nothing else has loaded them."""
    answer = server.check(history + make_prompt(40, "the fourth"), 24)
    assert answer.disk == answer.cached == end_of_prompt // PAGE * PAGE


def check_policy(server: CacheServer) -> None:
    """Runs under LATE_POLICY: long prompts are written at their second use, short ones never."""
    before = server.settle()
    long, short = make_prompt(5 * PAGE + 1, "long"), make_prompt(3 * PAGE + 1, "short")
    for prompt in (long, short):
        server.check(prompt)
    once = server.settle()
    assert once["pages_persisted"] == before["pages_persisted"]
    for prompt in (long, short):
        assert server.check(prompt).device > 0
    twice = server.settle()
    deadline = time.monotonic() + 20
    while twice["pages_persisted"] < once["pages_persisted"] + 5 and time.monotonic() < deadline:
        time.sleep(0.02)
        twice = server.settle()
    assert twice["pages_persisted"] == once["pages_persisted"] + 5
    withheld = {reason: twice["pages_withheld"][reason] - before["pages_withheld"].get(reason, 0) for reason in REASONS}
    assert withheld == {"no_hit": 5, "short_prompt": 3}


def test_restarts_over_tp_sizes(start_tiers: Start, tmp_path: Path):
    """TP 2 writes and TP 1 reads; then TP 1 writes and TP 2 reads. Conversations go on over both restarts.

    The last server writes by another policy, which changes nothing for what is on disk.
    """
    prompts, later = boundary_prompts(), [make_prompt(85, ("later", number)) for number in range(6)]
    disk = tmp_path / "pages"
    with start_tiers("--tp", "2", disk=disk) as server:
        assert all(answer.cached == 0 for answer in server.check_all(prompts, 8))
        conversation = three_turns(server, "first")
        server.check_clean()
    with start_tiers(disk=disk) as server:
        check_fourth_turn(server, *conversation)
        assert disk_tokens(server, prompts) == [usable(prompt) for prompt in prompts]
        server.check_all(later)
        conversation = three_turns(server, "second")
        server.check_clean()
    with start_tiers("--tp", "2", *LATE_POLICY, disk=disk) as server:
        check_fourth_turn(server, *conversation)
        assert disk_tokens(server, later) == [usable(prompt) for prompt in later]
        check_policy(server)
        server.check_clean()


KILLS = ("disk.after_pwrite:kill:n=9", "disk.before_commit:kill:n=4", "disk.before_promotion:kill:n=2")
"""Every point, many times, by `test_kill_points.py` of the unit tests; here what the whole server makes of a few."""


def test_kills_of_everything_under_load(start_tiers: Start, tmp_path: Path):
    prompts, disk = make_trees(8, 6, "killed"), tmp_path / "pages"
    for rule in KILLS:
        flags = ("--max_total_token_num", "2048", "--fault_inject", rule)
        with start_tiers(*flags, disk=disk, host_pages=200) as server:
            with Load(server, prompts) as load:
                wait_for_line(server, f"killed at {rule.split(':')[0]}")
                kill_all(server)
            assert load.wrong == []
    with start_tiers(disk=disk) as server:
        answers = server.check_all(prompts, 16)
        assert any(answer.disk for answer in answers)
        server.check_clean()


def wait_for_line(server: CacheServer, line: str, deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while line not in server.server.log_path.read_text():
        assert time.monotonic() < deadline, f"{line!r} was not logged"
        time.sleep(0.01)


def damage_objects(disk: Path) -> None:
    """A fifth of the slots gets a flipped bit, a fifth is exchanged with its neighbours, the last tenth is cut off."""
    with contextlib.closing(sqlite3.connect(disk / "index.sqlite")) as index:
        (segment,) = {row[0] for row in index.execute("select segment from objects")}
        slots = sorted(row[0] for row in index.execute("select slot from objects"))
    (path,) = disk.glob(f"segment-*{segment}")
    with path.open("r+b") as file:
        for slot in slots[::5]:
            file.seek(slot * SLOT + 1234)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 16]))
        for first, second in zip(slots[1::10], slots[2::10], strict=False):
            file.seek(first * SLOT)
            one = file.read(SLOT)
            file.seek(second * SLOT)
            two = file.read(SLOT)
            for slot, data in ((first, two), (second, one)):
                file.seek(slot * SLOT)
                file.write(data)
        file.truncate(slots[len(slots) * 9 // 10] * SLOT + 100)


def delete_segments(disk: Path) -> None:
    for path in disk.glob("segment-*"):
        path.unlink()


def truncate_index(disk: Path) -> None:
    os.truncate(disk / "index.sqlite", 5000)


def delete_index(disk: Path) -> None:
    for path in disk.glob("index.sqlite*"):
        path.unlink()


DAMAGES: list[tuple[Callable[[Path], None], bool, str]] = [
    (damage_objects, True, "damaged page"),
    (delete_segments, False, "damaged page"),
    (truncate_index, False, "cannot be read"),
    (delete_index, False, "does not know"),
]
"""What is done to the directory, whether some pages are still found, and what the one line says."""


def test_damage_is_a_miss_and_one_line(start_tiers: Start, tmp_path: Path):
    """One after the other; each server stores again what it has missed."""
    prompts, disk = [make_prompt(16 * 4 + 5, ("damage", number)) for number in range(24)], tmp_path / "pages"
    with start_tiers(disk=disk) as server:
        server.check_all(prompts, 8)
        server.settle()
    for damage, finds_some, line in DAMAGES:
        damage(disk)
        with start_tiers(disk=disk) as server:
            found = sum(answer.disk for answer in server.check_all(prompts, 4))
            assert found < sum(map(usable, prompts)), damage
            assert bool(found) is finds_some, damage
            tier = server.check_clean()["lower_tier"]
            log = server.server.log_path.read_text()
        assert line in log, damage
        assert "Traceback" not in log, damage
        if damage in (damage_objects, delete_segments):
            assert tier["loads_corrupt"] > 0, damage
        elif damage is truncate_index:
            assert tier["index_resets"] == 1


def test_a_small_quota_holds(start_tiers: Start, tmp_path: Path):
    disk, quota_pages = tmp_path / "pages", 64
    prompts = [make_prompt(16 * 5 + 3, ("quota", number)) for number in range(40)]
    with start_tiers(disk=disk, disk_pages=quota_pages, host_pages=64) as server:
        for _ in range(2):
            server.check_all(prompts, 16)
            server.flush_device()
            assert sum(path.stat().st_size for path in disk.glob("segment-*")) <= quota_pages * SLOT
        server.check_clean()


def test_a_directory_that_cannot_be_used_is_refused_with_one_line(start_tiers: Start, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pytest.fail.Exception, match="disk cache") as failure, contextlib.ExitStack() as stack:
        stack.enter_context(start_tiers(disk=tmp_path / "file" / "pages"))
    assert "Traceback" not in str(failure.value)
