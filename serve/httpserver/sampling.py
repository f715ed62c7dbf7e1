"""From request fields to sampling parameters and text rules."""

from serve.httpserver.errors import bad_request
from serve.httpserver.openai_protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest
from serve.httpserver.prompts import EncodedPrompt, PromptEncoder
from serve.httpserver.request_service import SEED_MASK, ServiceSettings
from serve.httpserver.sequence import TextRules
from serve.httpserver.stop_strings import compile_stops
from serve.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


def check_supported(body: SamplingRequest) -> None:
    """Raises a 400 for documented fields that this server does not have."""
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request("only response_format {'type': 'text'} is supported", "response_format", "unsupported_value")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream", "stream_options")
    if isinstance(body, CompletionRequest):
        _check_completion(body)
    if isinstance(body, ChatCompletionRequest):
        _check_chat(body)


def _check_completion(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is supported only where it equals n", "best_of", "unsupported_value")
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix", "unsupported_value")


def _check_chat(body: ChatCompletionRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    if body.modalities is not None and body.modalities != ["text"]:
        raise bad_request("only the modality 'text' is supported", "modalities", "unsupported_value")
    if body.tool_choice not in (None, "none", "auto"):
        raise bad_request("a forced tool call is not supported", "tool_choice", "unsupported_value")


def output_limit(
    prompts: list[EncodedPrompt], asked: int | None, default: int | None, encoder: PromptEncoder, names: tuple[str, str]
) -> int:
    """Tokens to generate at most. asked: by the client; default: what to take without, None for all there is room for.

    names: of the prompt's field and of the limit's. Raises a 400 when prompt and output do not fit the context.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room = encoder.room_after(longest)
    if room < (1 if asked is None else min(asked, 1)):
        raise encoder.too_long(longest, names[0])
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        message = f"{names[1]} is {asked}, but after a prompt of {longest} tokens there is room for {room} only"
        raise bad_request(message, names[1], "context_length_exceeded")
    return asked


def sampling_params(
    body: SamplingRequest, max_tokens: int, settings: ServiceSettings, drawn_seed: int
) -> SamplingParams:
    """What workers are told, less log-probabilities. drawn_seed: for a request that names none."""
    _check_ids(body, settings.vocab_size)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens is above the limit of {max_tokens} tokens", "min_tokens")
    # Nucleus sampling from a mass of zero is the best token alone.
    top_p = body.top_p or 0.0
    top_k = 1 if top_p == 0 else max(body.top_k or 0, 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(body.temperature or 0.0),
        top_k=min(top_k, settings.vocab_size),
        top_p=float(top_p) if top_p > 0 else 1.0,
        min_p=float(body.min_p or 0.0),
        repetition_penalty=float(body.repetition_penalty or 1.0),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        seed=(drawn_seed if body.seed is None else body.seed) & SEED_MASK,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        # The router knows the ends that the model's config names; the tokenizer may name more.
        stop_token_ids=sorted({*(body.stop_token_ids or ()), *(() if body.ignore_eos else settings.end_ids)}),
        logit_bias=body.logit_bias,
    )


def _check_ids(body: SamplingRequest, vocab_size: int) -> None:
    for name, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids or ())):
        for token_id in ids:
            if token_id >= vocab_size:
                raise bad_request(f"token id {token_id} is not in the vocabulary of {vocab_size}", name)


def text_rules(body: SamplingRequest, sampling: SamplingParams) -> TextRules:
    """How the request's tokens become text."""
    return TextRules(
        stops=compile_stops(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        end_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        wants_logprobs=sampling.logprobs is not None,
        wants_token_ids=bool(body.return_token_ids),
        wants_prompt_logprobs=sampling.prompt_logprobs is not None,
    )
