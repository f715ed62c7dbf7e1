"""The routes of the OpenAI API, and tokenizing."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from serve.httpserver.answers import Answer, ChatAnswer, CompletionAnswer, json_response
from serve.httpserver.bodies import parse_body
from serve.httpserver.errors import ErrorBody, bad_request
from serve.httpserver.generation import GenerationSpec
from serve.httpserver.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from serve.httpserver.openai_responses import (
    ChatCompletion,
    Completion,
    DetokenizeResult,
    Model,
    ModelList,
    TokenizeResult,
)
from serve.httpserver.prompts import EncodedPrompt
from serve.httpserver.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    check_supported,
    output_limit,
    sampling_params,
    text_rules,
)
from serve.httpserver.scoring import prompt_only
from serve.httpserver.state import AppState, require_api_key, state_of
from serve.httpserver.streaming import EventStream, GenerationResponse, WholeAnswer
from serve.types import SamplingParams

router = APIRouter(dependencies=[Depends(require_api_key)])

_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "a field is wrong, or the request does not fit",
        401: "the API key is missing or wrong",
        404: "the model is not served",
        408: "the body did not come in time",
        413: "the body is too large",
        415: "the body is not JSON",
        422: "a parameter cannot be processed",
        429: "the queue is full",
        503: "the engine is starting or restarting",
        504: "the request took too long",
    }.items()
}


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The part of the API's description that the routes, which read bodies themselves, cannot imply."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


REQUEST_MODELS: list[type[BaseModel]] = [
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
]


@router.get("/v1/models", response_model=ModelList, responses=_REFUSALS)
async def list_models(request: Request) -> Response:
    """The one model of this server."""
    return json_response({"object": "list", "data": [_model_dict(state_of(request))]})


@router.get("/v1/models/{model:path}", response_model=Model, responses=_REFUSALS)
async def get_model(request: Request, model: str) -> Response:
    """One model."""
    state = state_of(request)
    state.check_model(model)
    return json_response(_model_dict(state))


def _model_dict(state: AppState) -> dict[str, Any]:
    return {
        "id": state.settings.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "varve",
        "max_model_len": state.max_total_tokens,
    }


def _stream_responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, "content": content, "description": "an answer, or its stream"}, **_REFUSALS}


@router.post("/v1/completions", responses=_stream_responses(Completion), openapi_extra=_body_of(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    state = state_of(request)
    body = await parse_body(request, CompletionRequest, state.settings.body_limit)
    state.check_model(body.model)
    check_supported(body)
    prompts = await state.encoder.completion(body.prompt, body.add_special_tokens is not False)
    wants_scores = body.logprobs is not None and bool(body.echo)
    limit = output_limit(prompts, body.max_tokens, DEFAULT_COMPLETION_TOKENS, state.encoder, ("prompt", "max_tokens"))
    answer = CompletionAnswer(
        state.service.tokenizer,
        request.scope["varve.request_id"],
        state.settings.model_name,
        with_logprobs=body.logprobs is not None,
        stream_usage=_wants_usage(body),
        with_token_ids=bool(body.return_token_ids),
        echo=prompts if body.echo else None,
        n=body.n or 1,
    )
    sampling = sampling_params(body, limit, state.service.settings, state.service.new_seed())
    sampling = msgspec.structs.replace(
        sampling, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None
    )
    spec = _spec(request, body, prompts, sampling)
    if limit == 0:
        return prompt_only(state.service, spec, answer, bool(body.stream), wants_scores)
    return _start(request, spec, answer, bool(body.stream))


@router.post(
    "/v1/chat/completions",
    responses=_stream_responses(ChatCompletion),
    openapi_extra=_body_of(ChatCompletionRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await parse_body(request, ChatCompletionRequest, state.settings.body_limit)
    state.check_model(body.model)
    check_supported(body)
    tools = None if body.tool_choice == "none" else body.tools
    add_prompt = body.add_generation_prompt is not False
    prompt = await state.encoder.chat(
        body.messages, tools, add_prompt, body.chat_template_kwargs or {}, body.add_special_tokens is True
    )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = output_limit([prompt], getattr(body, name), None, state.encoder, ("messages", name))
    answer = ChatAnswer(
        state.service.tokenizer,
        request.scope["varve.request_id"],
        state.settings.model_name,
        with_logprobs=bool(body.logprobs),
        stream_usage=_wants_usage(body),
        with_token_ids=bool(body.return_token_ids),
    )
    sampling = sampling_params(body, limit, state.service.settings, state.service.new_seed())
    sampling = msgspec.structs.replace(sampling, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    return _start(request, _spec(request, body, [prompt], sampling), answer, bool(body.stream))


def _wants_usage(body: SamplingRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _spec(
    request: Request, body: SamplingRequest, prompts: list[EncodedPrompt], sampling: SamplingParams
) -> GenerationSpec:
    return GenerationSpec(
        request_id=request.scope["varve.request_id"],
        prompts=[prompt.token_ids for prompt in prompts],
        sampling=sampling,
        n=body.n or 1,
        rules=text_rules(body, sampling),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )


def _start(request: Request, spec: GenerationSpec, answer: Answer, stream: bool) -> GenerationResponse:
    service = state_of(request).service
    generation = service.start(spec)
    service.metrics.prepare.observe(time.monotonic() - request.scope["varve.began"])
    kind = EventStream if stream else WholeAnswer
    return kind(service, generation, answer)


@router.post("/tokenize", response_model=TokenizeResult, responses=_REFUSALS, openapi_extra=_body_of(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation."""
    state = state_of(request)
    body = await parse_body(request, TokenizeRequest, state.settings.body_limit)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt" if body.messages is None else "messages")
    if body.messages is not None:
        add_prompt = body.add_generation_prompt is not False
        arguments = body.chat_template_kwargs or {}
        prompt = await state.encoder.chat(
            body.messages, body.tools, add_prompt, arguments, body.add_special_tokens is True
        )
        ids = prompt.token_ids.tolist()
    else:
        ids = await state.encoder.ids_of(body.prompt or "", body.add_special_tokens is not False)
    return json_response({"count": len(ids), "max_model_len": state.max_total_tokens, "tokens": ids})


@router.post(
    "/detokenize", response_model=DetokenizeResult, responses=_REFUSALS, openapi_extra=_body_of(DetokenizeRequest)
)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await parse_body(request, DetokenizeRequest, state.settings.body_limit)
    state.check_model(body.model)
    return json_response({"prompt": await state.encoder.text_of(body.tokens, "tokens")})
