"""What the routes of one app share."""

import asyncio
import hmac
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import Request

from serve.cache_operations import Ask, ask_in
from serve.httpserver.errors import ApiError
from serve.httpserver.metrics import MetricsBoard
from serve.httpserver.prompts import PromptEncoder
from serve.httpserver.request_service import RequestService

# Calls of the control plane under way at most; more wait.
MAX_CONTROL_CALLS = 8

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class AppSettings:
    """What the launcher decided. body_limit: bytes; run_dir: where control sockets are, None without an engine."""

    model_name: str
    body_limit: int
    api_key: str | None = None
    admin_api_key: str | None = None
    run_dir: Path | None = None


@dataclass
class AppState:
    """Everything behind the routes."""

    settings: AppSettings
    service: RequestService
    encoder: PromptEncoder
    board: MetricsBoard | None = None
    is_stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    # Threads of their own: calls of a process that hangs must not take those that tokenize and decode requests.
    control_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_CONTROL_CALLS, thread_name_prefix="control-call")
    )

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of one request."""
        return self.service.settings.max_total_tokens

    def check_model(self, name: str | None) -> None:
        """Raises a 404 for a model that is not served."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")

    async def ask_control(self, call: Callable[[Ask], Answer]) -> Answer:
        """Run `call`, which asks other processes of this server, on a thread. Raises what it raises, and a 503."""
        if self.settings.run_dir is None:
            raise ApiError(503, "there is no engine to ask", code="engine_unavailable")
        return await asyncio.get_running_loop().run_in_executor(
            self.control_threads, call, ask_in(self.settings.run_dir)
        )


def state_of(request: Request) -> AppState:
    """The state of the app that serves a request."""
    found = request.app.state.varve
    assert isinstance(found, AppState)
    return found


def _check_bearer(request: Request, key: str) -> None:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        message = "you did not provide the right API key in an 'Authorization: Bearer KEY' header"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def require_api_key(request: Request) -> None:
    """Raises a 401 unless the request has the server's API key, where there is one."""
    key = state_of(request).settings.api_key
    if key is not None:
        _check_bearer(request, key)


async def require_admin_key(request: Request) -> None:
    """Raises a 401 unless the request has the admin key; 403 when the server has none."""
    key = state_of(request).settings.admin_api_key
    if key is None:
        raise ApiError(403, "the admin routes are off; start the server with --admin_api_key", code="admin_disabled")
    _check_bearer(request, key)
