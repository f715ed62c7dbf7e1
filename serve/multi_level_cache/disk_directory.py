"""The disk cache's directory: its lock, and the key of page names that makes pages of an earlier start nameable."""

import fcntl
import os
import secrets
from pathlib import Path

KEY_BYTES = 32
KEY_FILE = "key"
LOCK_FILE = "lock"


class DiskDirectoryError(Exception):
    """The directory cannot be used; one line for the user."""


class DirectoryLock:
    """Holds a directory for one process. The kernel lets go when the process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory (0700) where it is missing. Raises DiskDirectoryError."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskDirectoryError(f"disk cache {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise DiskDirectoryError(f"disk cache {directory} is used by another server") from error

    def release(self) -> None:
        """Let go."""
        os.close(self._fd)


def load_or_create_key(directory: Path) -> bytes:
    """The 32-byte key kept in the directory, readable by its owner only. Raises DiskDirectoryError."""
    path = directory / KEY_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_key(path)
        key = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise DiskDirectoryError(f"disk cache key {path}: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise DiskDirectoryError(
            f"disk cache key {path} has {len(key)} bytes, not {KEY_BYTES}; remove it to start anew"
        )
    if mode & 0o077:
        raise DiskDirectoryError(f"disk cache key {path} is readable by others; chmod 600 it")
    return key


def _write_key(path: Path) -> None:
    """Complete or not at all: written aside, synced, then renamed, while the lock keeps other servers away.

    A link would do without the lock, but many file systems have none (exFAT, SMB, FUSE).
    """
    lock = DirectoryLock(path.parent)
    aside = path.with_name(f"{path.name}.new")
    try:
        if not path.exists():
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
        lock.release()
