import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from serve.errors import ConfigError
from serve.launcher.run_directory import PID_FILE, RunDirectory, find_base, is_dead, remove_leftovers


def test_it_is_private_and_goes_with_its_scope(run_dir: Path) -> None:
    with RunDirectory.create(None, {"XDG_RUNTIME_DIR": str(run_dir)}) as made:
        assert made.path.parent == run_dir
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
        assert (made.path / PID_FILE).read_text().split()[0] == str(os.getpid())
        (made.path / "router.1.sock").touch()
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("runtime", ["", "/nonexistent", "/proc/version", "/tmp/" + "x" * 100])
def test_without_a_usable_runtime_directory_it_goes_to_tmp(runtime: str) -> None:
    assert find_base({"XDG_RUNTIME_DIR": runtime}) == Path("/tmp")


def test_the_dead_are_removed_and_the_living_stay(run_dir: Path) -> None:
    dead, unknown = run_dir / "varve-dead", run_dir / "varve-unknown"
    for path in (dead, unknown):
        path.mkdir()
    (dead / PID_FILE).write_text("1 1\n")
    with RunDirectory.create(None, {"XDG_RUNTIME_DIR": str(run_dir)}) as living:
        assert not dead.exists()
        assert remove_leftovers(run_dir) == []
        assert not is_dead(living.path / PID_FILE)
        assert unknown.exists()


def test_a_lock_ends_with_its_process(run_dir: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from serve.launcher.run_directory import RunDirectory;"
        "RunDirectory.create(Path(sys.argv[1]), {}); os._exit(1)"
    )
    path = run_dir / "own"
    subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert is_dead(path / PID_FILE)
    with RunDirectory.create(path, {}) as again:
        assert again.path == path
    assert not path.exists()


def test_a_requested_directory_in_use_is_refused(run_dir: Path) -> None:
    with (
        RunDirectory.create(run_dir / "own", {}),
        pytest.raises(ConfigError, match=f"belongs to a running server .process {os.getpid()}"),
    ):
        RunDirectory.create(run_dir / "own", {})


def test_a_directory_with_other_files_is_refused(run_dir: Path) -> None:
    (run_dir / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(run_dir, {})
    assert (run_dir / "thesis.tex").exists()


def test_a_path_too_long_for_sockets_is_refused() -> None:
    with pytest.raises(ConfigError, match="too long for sockets"):
        RunDirectory.create(Path("/tmp") / ("x" * 90), {})


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot make the run directory"):
        RunDirectory.create(Path("/proc/varve"), {})


def test_a_full_disk_leaves_no_directory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", no_space)
    with pytest.raises(ConfigError, match="No space left on device"):
        RunDirectory.create(None, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
