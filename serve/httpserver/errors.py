"""Errors as OpenAI's API gives them: `{"error": {"message", "type", "param", "code"}}`."""

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
CLIENT_CLOSED_REQUEST = 499


class ErrorDetail(BaseModel):
    """What went wrong, for a person and for a program."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with a status and an OpenAI error body.

    param: the field at fault, where there is one. headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error as plain data."""
        kind = "server_error" if self.status >= 500 else ERROR_TYPES.get(self.status, "invalid_request_error")
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": detail}

    def response(self) -> Response:
        """The error as a response."""
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param, code)


def unavailable(reason: str, retry_after_s: int = 5) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, reason, code="engine_unavailable", headers={"Retry-After": str(retry_after_s)})


def overloaded(reason: str) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, reason, code="queue_full", headers={"Retry-After": "1"})


class ClientGoneError(Exception):
    """The client has closed its connection; there is nobody to answer."""


def install_handlers(app: FastAPI) -> None:
    """Give every error that is expected OpenAI's shape; `RequestContext` answers the others."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientGoneError, _client_gone)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    message = f"{phrase}: {request.method} {request.url.path}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return bad_request(str(first["msg"]), ".".join(str(part) for part in first["loc"][1:])).response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
