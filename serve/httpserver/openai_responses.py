"""Response bodies of the OpenAI API, for the API's own description. Answers are built as plain data for speed."""

from typing import Any, Literal

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """How much of the prompt was not computed, and which tier it came from."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class Usage(BaseModel):
    """Tokens of a request; the prompt counts once whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Parallel lists over tokens; entries are null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """token_ids: of generated tokens, with return_token_ids."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] = []


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """token_ids: of generated tokens, with return_token_ids."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class TokenizeResult(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResult(BaseModel):
    prompt: str


class HealthResult(BaseModel):
    status: str


class AdminResult(BaseModel):
    """What the parts asked have answered, by part."""

    result: dict[str, Any]
