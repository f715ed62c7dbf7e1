"""The key of page names comes into the directory whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from serve.multi_level_cache.disk_directory import KEY_BYTES, DirectoryLock, DiskDirectoryError, load_or_create_key


def refuse(*arguments: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_file_system_without_links_can_have_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "link", refuse)
    key = load_or_create_key(tmp_path / "cache")
    assert len(key) == KEY_BYTES
    assert load_or_create_key(tmp_path / "cache") == key
    assert (tmp_path / "cache" / "key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(DiskDirectoryError, match="key: Operation not permitted"):
            load_or_create_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert len(load_or_create_key(tmp_path)) == KEY_BYTES


def test_only_the_holder_of_the_directory_makes_a_key(tmp_path: Path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DiskDirectoryError, match="is used by another server"):
        load_or_create_key(tmp_path)
    lock.release()
    key = load_or_create_key(tmp_path)
    lock = DirectoryLock(tmp_path)
    assert load_or_create_key(tmp_path) == key
    lock.release()
