"""Health, metrics, and the admin routes, which go to the control plane of the other processes."""

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from serve.httpserver.answers import json_response
from serve.httpserver.cache_metrics import cache_families
from serve.httpserver.errors import ApiError, ErrorBody
from serve.httpserver.metric_families import gauge
from serve.httpserver.metrics import render
from serve.httpserver.openai_responses import AdminResult, HealthResult
from serve.httpserver.router_metrics import router_families
from serve.httpserver.state import AppState, require_admin_key, state_of
from serve.ipc.control import ControlError

# Control sockets by the name that users see.
PARTS = {
    "router": "control-router",
    "cache": "control-cache",
    "worker": "control-worker-0",
    "launcher": "control-launcher",
}
# Scrapers wait ten seconds; a part that hangs must cost its own numbers only.
METRICS_TIMEOUT_S = 1.0
LONG_CONTROL_TIMEOUT_S = 120.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

health_router = APIRouter()
admin_router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin_key)])

_UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody, "description": "the engine is down"}}
_ADMIN_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "a parameter is wrong",
        401: "the admin key is missing or wrong",
        403: "the server has no admin key",
        404: "no such part",
        502: "the part refused",
        503: "the part is away",
    }.items()
}


@health_router.get("/health", response_model=HealthResult, responses=_UNAVAILABLE)
async def health(request: Request) -> Response:
    """200 while the engine answers."""
    state_of(request).service.check_ready()
    return json_response({"status": "ok"})


@health_router.get("/readiness", response_model=HealthResult, responses=_UNAVAILABLE)
async def readiness(request: Request) -> Response:
    """200 while new requests are welcome: the engine answers and the server is not about to stop."""
    state = state_of(request)
    state.service.check_ready()
    if state.is_stopping:
        raise ApiError(503, "the server is stopping", code="stopping")
    return json_response({"status": "ready"})


@health_router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of all HTTP processes, of the router and of the cache's tiers."""
    state = state_of(request)
    update_gauges(state)
    total = state.service.metrics if state.board is None else state.board.total()
    router, cache = await asyncio.gather(_statistics_of(state, "router"), _statistics_of(state, "cache"))
    is_up = gauge("varve_engine_up", "1: requests are answered", (), {(): float(state.service.is_up)})
    families = [is_up, *router_families(router), *cache_families(router, cache)]
    return Response(render(total, families), media_type=METRICS_TYPE)


def update_gauges(state: AppState) -> None:
    """Bring this process's gauges up to date."""
    service = state.service
    service.metrics.gauges["varve_http_active_sequences"] = float(service.num_active)
    service.metrics.gauges["varve_http_free_slots"] = float(service.num_free_slots)


async def _statistics_of(state: AppState, part: str) -> dict[str, Any]:
    """Empty when the part is away or late: its absence is no reason to show nothing of the others."""
    run_dir = state.settings.run_dir
    if run_dir is None or not (run_dir / f"{PARTS[part]}.sock").exists():
        return {}
    try:
        found = await state.ask_control(lambda ask: ask(PARTS[part], "statistics", METRICS_TIMEOUT_S))
    except ControlError:
        return {}
    return found if isinstance(found, dict) else {}


async def _admin_call(request: Request, part: str, method: str) -> Response:
    if part not in PARTS:
        raise ApiError(404, f"no part {part!r}; there are: {', '.join(PARTS)}", "part", "unknown_part")
    try:
        result = await state_of(request).ask_control(lambda ask: ask(PARTS[part], method, LONG_CONTROL_TIMEOUT_S))
    except ControlError as error:
        raise ApiError(502, str(error), code="control_error") from error
    return json_response({"result": {part: result}})


def _add_route(http_method: str, method: str, summary: str) -> None:
    async def route(request: Request, part: str = "router") -> Response:
        return await _admin_call(request, part, method)

    admin_router.add_api_route(
        f"/{method}",
        route,
        methods=[http_method],
        response_model=AdminResult,
        responses=_ADMIN_ERRORS,
        name=f"admin_{method}",
        summary=summary,
    )


_add_route("GET", "status", "What a part is doing")
_add_route("GET", "statistics", "A part's counters")
_add_route("GET", "list", "What a part holds")
_add_route("POST", "check", "Check a part's bookkeeping")
_add_route("POST", "flush", "Drop what a part has cached")
_add_route("POST", "profile_start", "Record where the time of steps goes (part=worker)")
_add_route("POST", "profile_stop", "Stop recording, and give what was recorded (part=worker)")
