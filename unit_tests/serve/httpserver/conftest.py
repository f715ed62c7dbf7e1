import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from models.packaged import pull
from serve.httpserver.app import create_app
from serve.httpserver.connection import server_options
from serve.httpserver.metrics import HttpMetrics
from serve.httpserver.process import QuietServer
from serve.httpserver.request_service import RequestService, ServiceSettings
from serve.httpserver.state import AppSettings
from serve.httpserver.tokenizer import ServeTokenizer, load_tokenizer
from serve.ipc.request_table import RequestTable, TableShape

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from varve_fakes.fake_router import FakeRouter

MODEL = "smollm2-135m"
MAX_TOKENS = 256
NUM_SLOTS = 8


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return pull(MODEL, progress=False)


@pytest.fixture(scope="session")
def tokenizer(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeTokenizer:
    return load_tokenizer(smollm_path, tmp_path_factory.mktemp("tokenizers"))


@dataclass
class Bench:
    """A whole HTTP process in this one, over a fake router."""

    app: FastAPI
    service: RequestService
    router: FakeRouter
    table: RequestTable
    tokenizer: ServeTokenizer
    epoch: int = 1

    def engine_up(self) -> None:
        self.service.engine_up(self.epoch, b"namespace", b"k" * 32)
        self.epoch += 1

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://varve", **options) as client:
            yield client

    def says(self, *texts: str) -> None:
        """Choice i of the requests to come generates texts[i % len], token by token."""
        first = len(self.router.seen)
        tokens = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.router.script = lambda request: tokens[(request.choice - first) % len(tokens)]

    def check_idle(self) -> None:
        assert self.service.num_active == 0
        assert not self.router.running
        assert all(self.table.is_free(slot) for slot in range(self.table.shape.num_slots))


Build = Callable[..., Bench]


@pytest.fixture
def build(tokenizer: ServeTokenizer) -> Iterator[Build]:
    tables: list[RequestTable] = []

    def make(up: bool = True, timeout_s: float = 60.0, body_limit: int = 1 << 20, **settings: Any) -> Bench:
        table = RequestTable.create(TableShape(NUM_SLOTS, MAX_TOKENS, 16))
        tables.append(table)
        router = FakeRouter(table)
        numbers = ServiceSettings(
            server=0,
            owned=range(NUM_SLOTS),
            max_total_tokens=MAX_TOKENS,
            vocab_size=tokenizer.vocab_size,
            end_ids=tokenizer.eos_token_ids,
            request_timeout_s=timeout_s,
            base_seed=7,
        )
        service = RequestService(numbers, table, tokenizer, lambda epoch: router, HttpMetrics())
        router.service = service
        app = create_app(service, AppSettings("smol", body_limit, **settings))
        bench = Bench(app, service, router, table, tokenizer)
        if up:
            bench.engine_up()
        bench.says("Hello there, world.")
        return bench

    yield make
    for table in tables:
        table.close()


@pytest.fixture
def bench(build: Build) -> Bench:
    return build()


@pytest.fixture
def run() -> Callable[[Any], Any]:
    """Run a coroutine to its end."""
    return asyncio.run


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """The app behind a real uvicorn on loopback; gives its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **server_options())
    server = QuietServer(config)
    serving = asyncio.get_running_loop().create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def serve_app() -> Callable[[FastAPI], Any]:
    """`async with serve_app(app) as url`."""
    return listening
