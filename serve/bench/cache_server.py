"""The servers of `varve bench cache`: one for each setup of tiers."""

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from serve.bench.cache_options import CacheBenchOptions, Setup
from serve.bench.flags import BenchError
from serve.bench.own_server import BenchServer, own_server


def serve_flags(options: CacheBenchOptions, setup: Setup, disk_dir: Path) -> list[str]:
    """Flags of a server with the tiers of a setup."""
    words = ["--max_total_token_num", str(options.device_tokens)]
    if setup is not Setup.DEVICE:
        words += ["--enable_cpu_cache", "--cpu_cache_storage_size", str(options.cpu_cache_storage_size)]
    if setup is Setup.DISK:
        words += ["--enable_disk_cache", "--disk_cache_storage_size", str(options.disk_cache_storage_size)]
        words += ["--disk_cache_dir", str(disk_dir)]
    return words + shlex.split(options.serve_flags)


@contextlib.contextmanager
def running_server(options: CacheBenchOptions, setup: Setup) -> Iterator[BenchServer]:
    """A server that is ready. Raises BenchError with its own last line when it does not start."""
    try:
        where = Path(tempfile.mkdtemp(prefix="varve-bench-", dir=options.disk_cache_dir))
    except OSError as error:
        raise BenchError(f"--disk_cache_dir {options.disk_cache_dir}: {error.strerror}") from error
    try:
        flags = serve_flags(options, setup, where / "pages")
        with own_server(options.model, flags, options.start_timeout) as server:
            yield server
    finally:
        shutil.rmtree(where, ignore_errors=True)
