"""The app keeps to its own OpenAPI description, whatever is sent to it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/readiness"),
    ("GET", "/metrics"),
    ("GET", "/admin/status"),
    ("POST", "/admin/flush"),
    ("GET", "/cache/stats"),
    ("GET", "/cache/ls"),
    ("POST", "/cache/check"),
    ("POST", "/flush_cache"),
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: part)
def test_nothing_breaks_the_app(build, method, path, mode):
    bench = build(admin_api_key=None)
    schema = schemathesis.openapi.from_asgi("/openapi.json", bench.app)
    operation = schema[path][method]
    num_examples = 40 if method == "POST" and not path.startswith(("/admin", "/cache", "/flush")) else 8
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        pytest.skip("nothing to get wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    check()
    bench.check_idle()


def test_completion_bodies_of_the_description_are_accepted(build):
    """Valid bodies reach the engine: the description is no stricter and no laxer than the server."""
    bench = build()
    schema = schemathesis.openapi.from_asgi("/openapi.json", bench.app)
    bodies = schema["/v1/completions"]["POST"].definition.raw["requestBody"]["content"]["application/json"]["schema"]
    assert bodies["$ref"] == "#/components/schemas/CompletionRequest"
    components = schema.raw_schema["components"]["schemas"]
    assert components["CompletionRequest"]["required"] == ["model", "prompt"]
    assert components["ChatMessage"]["properties"]["role"]["enum"][0] == "system"
