"""The ASGI application of one HTTP process."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from serve.httpserver.admin import admin_router, health_router
from serve.httpserver.bodies import LingeringRefusal
from serve.httpserver.cache_routes import cache_router
from serve.httpserver.errors import install_handlers
from serve.httpserver.metrics import MetricsBoard
from serve.httpserver.middleware import RequestContext
from serve.httpserver.openai_routes import REQUEST_MODELS
from serve.httpserver.openai_routes import router as openai_router
from serve.httpserver.prompts import PromptEncoder
from serve.httpserver.request_service import RequestService
from serve.httpserver.state import AppSettings, AppState
from serve.version import installed_version

REFERENCE = "#/components/schemas/{model}"


def create_app(service: RequestService, settings: AppSettings, board: MetricsBoard | None = None) -> FastAPI:
    """The routes over a service. board: sums metrics over HTTP processes, None with one only."""
    app = FastAPI(title="Varve", version=installed_version(), redirect_slashes=False, docs_url=None, redoc_url=None)
    numbers = service.settings
    encoder = PromptEncoder(service.tokenizer, numbers.vocab_size, numbers.max_total_tokens)
    app.state.varve = AppState(settings, service, encoder, board)
    for router in (openai_router, health_router, admin_router, cache_router):
        app.include_router(router)
    install_handlers(app)
    app.add_middleware(LingeringRefusal)
    app.add_middleware(RequestContext, metrics=service.metrics)
    _describe_bodies(app)
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Add the request models, which routes read themselves, to the app's OpenAPI description."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        description = generate()
        _, definitions = models_json_schema([(model, "validation") for model in REQUEST_MODELS], ref_template=REFERENCE)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in definitions["$defs"].items():
            schemas.setdefault(name, schema)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
