"""Request bodies of the OpenAI API, strict: wrong types and unknown fields are errors that name the field.

Fields beyond OpenAI's have vLLM's names. Limits on counts keep one request from costing more than its tokens.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_PROMPTS = 2048
MAX_TOKEN_ID = 2**32 - 1
INT64 = 2**63


class _FirstError(FailFast):
    """One error of a long list is enough; hashable, so that it can stand in a union."""

    __hash__ = object.__hash__


FIRST_ERROR = _FirstError()


def _is_token_list(value: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value)


def _check_prompt(value: object) -> str | list[str] | list[int] | list[list[int]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("the prompt is empty")
    if type(value[0]) is int:
        if not _is_token_list(value):
            raise ValueError("a list of token ids may hold integers from 0 on only")
        return value
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and item and _is_token_list(item) for item in value):
        return value
    raise ValueError("expected a list of strings, of token ids, or of non-empty lists of token ids")


def _check_stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if value is None:
        return []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"expected a string or a list of at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise ValueError(f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _check_logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"expected a map of at most {MAX_LOGIT_BIAS} token ids to numbers")
    found: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError("each key must be a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("each value must be a number from -100 to 100")
        found[int(key)] = float(bias)
    return found


def _none_is_false(value: bool | None) -> bool:
    return bool(value)


def _none_is(default: float) -> Callable[[float | None], float]:
    return lambda value: default if value is None else value


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_SCHEMA = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]}
_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {"type": "null"},
    ]
}

Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)
]
Stops = Annotated[list[str], PlainValidator(_check_stop), WithJsonSchema(_STOP_SCHEMA)]
LogitBias = Annotated[dict[int, float], PlainValidator(_check_logit_bias), WithJsonSchema(_BIAS_SCHEMA)]
Flag = Annotated[bool | None, AfterValidator(_none_is_false)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class StrictModel(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(StrictModel):
    """What a stream carries beside its deltas."""

    include_usage: Flag = Field(False, description="a last chunk with the usage of the whole request")
    include_obfuscation: Flag = Field(False, description="accepted, no effect")


class TextFormat(BaseModel):
    """Only `{"type": "text"}` is supported."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str = Field(max_length=64)


class SamplingRequest(StrictModel):
    """Fields that both completion routes share."""

    model: str = Field(min_length=1, max_length=512, description="a name from /v1/models")
    temperature: Annotated[float | None, AfterValidator(_none_is(1.0))] = Field(1.0, ge=0, le=2)
    top_p: Annotated[float | None, AfterValidator(_none_is(1.0))] = Field(1.0, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops = []
    stream: Flag = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float | None, AfterValidator(_none_is(0.0))] = Field(0.0, ge=-2, le=2)
    frequency_penalty: Annotated[float | None, AfterValidator(_none_is(0.0))] = Field(0.0, ge=-2, le=2)
    logit_bias: LogitBias = {}
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    user: str | None = Field(None, max_length=512)
    response_format: TextFormat | None = None
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off")
    min_p: Annotated[float | None, AfterValidator(_none_is(0.0))] = Field(0.0, ge=0, le=1)
    repetition_penalty: Annotated[float | None, AfterValidator(_none_is(1.0))] = Field(1.0, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    ignore_eos: Flag = False
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: Flag = False
    return_token_ids: Flag = Field(False, description="add the ids of generated tokens to each choice")
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="lower runs first, with --schedule_policy priority"
    )
    cache_salt: str | None = Field(None, max_length=1024, description="prompts share cached pages within one salt only")


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    prompt: Prompt = Field(description="text, token ids, or a list of either")
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="default 16; 0 computes no tokens")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="only equal to n")
    echo: Flag = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None


class ChatMessage(BaseModel):
    """One turn. Further fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None


class ToolDefinition(BaseModel):
    """A function that the model may be told about."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class ChatCompletionRequest(SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FIRST_ERROR] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: Flag = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[ToolDefinition], FIRST_ERROR] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = Field(None, max_length=8)
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class TokenizeRequest(StrictModel):
    """Body of /tokenize: a text, or messages."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FIRST_ERROR] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolDefinition], FIRST_ERROR] | None = Field(None, max_length=128)


class DetokenizeRequest(StrictModel):
    """Body of /detokenize."""

    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[TokenId], FIRST_ERROR]
