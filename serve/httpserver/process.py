"""One HTTP process: `main(context)` is what the launcher's child runs."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from socket import socket
from typing import Any

import uvicorn
import uvloop

from serve.httpserver.admin import update_gauges
from serve.httpserver.app import create_app
from serve.httpserver.bodies import default_body_limit
from serve.httpserver.connection import server_options
from serve.httpserver.metrics import HttpMetrics, MetricsBoard
from serve.httpserver.request_service import RequestService, ServiceSettings
from serve.httpserver.state import AppSettings, AppState
from serve.httpserver.tokenizer import ServeTokenizer, TokenizerError, load_tokenizer
from serve.ipc.channel import Inbox, Outbox
from serve.ipc.child import ChildContext, StartError
from serve.ipc.messages import ChildReady, EngineDown, EngineUp, Message, StopChild
from serve.ipc.process_control import freeze_start_up
from serve.ipc.request_table import RequestTable, slots_of_server

logger = logging.getLogger(__name__)
PUBLISH_INTERVAL_S = 1.0
KEEP_ALIVE_S = 75
BACKLOG = 2048
# What a client gets to read the error that ends its request when the server stops.
LAST_WORDS_S = 1.0


class QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the launcher, which ends its children in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(context: ChildContext) -> None:
    """Run until the launcher says stop. Raises StartError."""
    began = time.monotonic()
    tokenizer = _load_tokenizer(context)
    logger.info("tokenizer of %d tokens loaded in %.2f s", tokenizer.vocab_size, time.monotonic() - began)
    process = HttpProcess(context, tokenizer)
    freeze_start_up()
    uvloop.run(process.run())


def _load_tokenizer(context: ChildContext) -> ServeTokenizer:
    config = context.config
    try:
        return load_tokenizer(config.model_path, dummy=config.serve.load_format == "dummy")
    except TokenizerError as error:
        raise StartError(str(error)) from error


def model_fact(model: dict[str, Any], name: str) -> Any:
    """A fact of the model, at the top of what the launcher tells or in its `config`."""
    nested = model.get("config")
    return model.get(name, nested.get(name) if isinstance(nested, dict) else None)


def service_settings(context: ChildContext, tokenizer: ServeTokenizer) -> ServiceSettings:
    """This process's numbers."""
    config = context.config
    ends = model_fact(context.model, "eos_token_ids") or ()
    return ServiceSettings(
        server=context.index,
        owned=slots_of_server(config.num_slots, context.index, config.serve.num_http_servers),
        max_total_tokens=config.max_req_total_len,
        vocab_size=int(model_fact(context.model, "vocab_size") or tokenizer.vocab_size),
        end_ids=tokenizer.eos_token_ids | frozenset(int(token_id) for token_id in ends),
        request_timeout_s=config.serve.request_timeout,
        base_seed=config.serve.seed,
    )


class HttpProcess:
    """The event loop's side: launcher's messages, router's messages, and the web server."""

    def __init__(self, context: ChildContext, tokenizer: ServeTokenizer) -> None:
        self._context = context
        self._table = RequestTable.attach(context.fds["table"])
        metrics = HttpMetrics()
        self._board = MetricsBoard(context.run_dir, context.index, metrics)
        self._service = RequestService(
            service_settings(context, tokenizer), self._table, tokenizer, self._connect, metrics
        )
        config = context.config
        settings = AppSettings(
            model_name=config.model_name,
            body_limit=config.serve.http_max_body_size or default_body_limit(config.max_req_total_len),
            api_key=config.serve.api_key,
            admin_api_key=config.serve.admin_api_key,
            run_dir=context.run_dir,
        )
        self._app = create_app(self._service, settings, self._board)
        self._server: QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._failure: Exception | None = None

    def _connect(self, epoch: int) -> Outbox:
        return Outbox(self._context.run_dir, f"router.{epoch}")

    async def run(self) -> None:
        """Until StopChild has been carried out."""
        loop = asyncio.get_running_loop()
        inbox = Inbox(self._context.run_dir, f"http-{self._context.index}")
        tasks = [loop.create_task(self._read(inbox)), loop.create_task(self._publish())]
        loop.add_reader(self._context.parent.fileno(), self._on_parent)
        self._context.parent.send(ChildReady("httpserver", self._context.index, {}))
        stopped = loop.create_task(self._stopped.wait())
        try:
            await self._first_of([stopped, *tasks])
        finally:
            loop.remove_reader(self._context.parent.fileno())
            for task in [stopped, *tasks]:
                task.cancel()
            inbox.close()
        if self._failure is not None:
            raise self._failure
        if self._serving is not None:
            await self._serving

    @staticmethod
    async def _first_of(tasks: list[asyncio.Task[Any]]) -> None:
        """Wait for one to end; an error of any ends the process, so that the launcher starts it anew."""
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _read(self, inbox: Inbox) -> None:
        while True:
            self._service.handle(await inbox.receive_async())

    async def _publish(self) -> None:
        state: AppState = self._app.state.varve
        while True:
            update_gauges(state)
            self._board.publish()
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    def _on_parent(self) -> None:
        try:
            for message in self._context.parent.receive():
                self._handle(message)
        except Exception as error:  # a loop's callback has no caller; `run` raises it
            self._failure = error
            self._stopped.set()

    def _handle(self, message: Message) -> None:
        match message:
            case EngineUp() if self._app.state.varve.is_stopping:
                pass
            case EngineUp():
                namespace = bytes.fromhex(str(message.info["namespace"]))
                key = bytes.fromhex(str(message.info["key"]))
                self._service.engine_up(message.epoch, namespace, key)
                self._start_serving()
            case EngineDown():
                self._service.engine_down(message.reason)
            case StopChild():
                self._stop(message.drain_s)
            case _:
                logger.warning("dropped an unexpected %s", type(message).__name__)

    def _start_serving(self) -> None:
        if self._server is not None:
            return
        config = uvicorn.Config(self._app, timeout_keep_alive=KEEP_ALIVE_S, backlog=BACKLOG, **server_options())
        self._server = QuietServer(config)
        listening = socket(fileno=self._context.fds["listen"])
        self._serving = asyncio.get_running_loop().create_task(self._serve(self._server, listening))

    async def _serve(self, server: QuietServer, listening: socket) -> None:
        try:
            await server.serve(sockets=[listening])
        finally:
            self._stopped.set()

    def _stop(self, drain_s: float) -> None:
        """Accept nobody any more; requests get `drain_s` to end, then those that still run get an error."""
        self._app.state.varve.is_stopping = True
        if self._server is None:
            self._stopped.set()
            return
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(drain_s, self._end_requests)

    def _end_requests(self) -> None:
        self._service.shut_down()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut_connections)

    def _cut_connections(self) -> None:
        """For clients that do not read, or have not sent all of their request."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
