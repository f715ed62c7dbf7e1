"""Operating the cache over HTTP, behind the admin key."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from serve import cache_operations
from serve.cache_operations import Ask, CacheOperationError
from serve.httpserver.answers import json_response
from serve.httpserver.bodies import decode_json, read_body, validate
from serve.httpserver.errors import ApiError, ErrorBody
from serve.httpserver.openai_protocol import StrictModel
from serve.httpserver.state import require_admin_key, state_of

MAX_LISTED = 1000

cache_router = APIRouter(dependencies=[Depends(require_admin_key)])

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "a parameter is wrong",
        401: "the admin key is missing or wrong",
        403: "the server has no admin key",
        413: "the body is too large",
        503: "router or cache manager is away, or not all is done",
    }.items()
}


class FlushRequest(StrictModel):
    """cache_salt: flush the pages of requests with this salt only."""

    cache_salt: str | None = None


class CacheStats(BaseModel):
    """tiers: one report a tier; router, cache: raw statistics; away: who does not answer, and why."""

    tiers: list[dict[str, Any]]
    router: dict[str, Any]
    cache: dict[str, Any]
    away: dict[str, str]


class CacheListing(BaseModel):
    """Pages of the host, most recently used first."""

    pages: list[dict[str, Any]]


class CacheCheck(BaseModel):
    """Problems in the books, by part; all empty when all is well."""

    problems: dict[str, list[str]]


class FlushResult(BaseModel):
    """What was dropped. device_pages_in_use: no longer found, and freed when their requests end."""

    device_pages: int
    device_pages_in_use: int
    host_objects: int
    disk_objects: int


@cache_router.get("/cache/stats", response_model=CacheStats, responses=_ERRORS)
async def cache_stats(request: Request) -> Response:
    """Every tier's pages, bytes, hits and failures."""
    return json_response(await _run(request, cache_operations.stats))


@cache_router.get("/cache/ls", response_model=CacheListing, responses=_ERRORS)
async def cache_ls(
    request: Request, limit: int = Query(100, ge=0, le=MAX_LISTED), cache_salt: str | None = None
) -> Response:
    """Pages of the host, most recently used first; with cache_salt only those of its requests."""
    return json_response(
        {"pages": await _run(request, lambda ask: cache_operations.list_pages(ask, limit, cache_salt))}
    )


@cache_router.post("/cache/check", response_model=CacheCheck, responses=_ERRORS)
async def cache_check(request: Request) -> Response:
    """Check the books of router and cache manager."""
    return json_response({"problems": await _run(request, cache_operations.check)})


@cache_router.post(
    "/flush_cache",
    response_model=FlushResult,
    responses=_ERRORS,
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": FlushRequest.model_json_schema()}},
        }
    },
)
async def flush_cache(request: Request) -> Response:
    """Flush all tiers: once this is answered, no page of before is hit."""
    body = await read_body(request, state_of(request).settings.body_limit)
    wanted = validate(decode_json(body), FlushRequest) if body.strip() else FlushRequest()
    return json_response(await _run(request, lambda ask: cache_operations.flush(ask, wanted.cache_salt)))


async def _run(request: Request, operation: Callable[[Ask], Any]) -> Any:
    try:
        return await state_of(request).ask_control(operation)
    except CacheOperationError as error:
        raise ApiError(503, str(error), code="cache_unavailable") from error
