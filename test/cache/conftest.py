"""Tiny models, and servers with cache tiers that several tests share."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch

GIB = 2**30


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """The reference is tiny; more threads would only take cores from the servers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tiny_engine.TinyModel:
    return tiny_engine.TinyModel(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def start_tiers(
    start_server: Callable[..., Any], tiny: tiny_engine.TinyModel
) -> Callable[..., contextlib.AbstractContextManager[tiny_engine.CacheServer]]:
    """A server with a host tier of so many pages: `with start_tiers("--tp", "2", host_pages=100) as server`."""

    @contextlib.contextmanager
    def start(
        *flags: str,
        host_pages: int = 1280,
        disk: Path | None = None,
        disk_pages: int = 2000,
        model: tiny_engine.TinyModel = tiny,
    ) -> Iterator[tiny_engine.CacheServer]:
        sizes = [
            "--enable_cpu_cache",
            "--cpu_cache_load_policy",
            "always",
            "--cpu_cache_storage_size",
            str(host_pages * tiny_engine.PAGE_BYTES / GIB),
        ]
        if disk is not None:
            quota = str(disk_pages * tiny_engine.PAGE_BYTES / GIB)
            sizes += ["--enable_disk_cache", "--disk_cache_dir", str(disk), "--disk_cache_storage_size", quota]
        with start_server(*tiny_engine.FLAGS, *sizes, *flags, model=str(model.path)) as server:
            yield tiny_engine.CacheServer(server, model)

    return start
