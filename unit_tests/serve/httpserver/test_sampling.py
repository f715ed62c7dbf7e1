"""What fields mean: to the workers, to the text, and where they cannot be."""

import numpy as np
import pytest

from serve.httpserver.errors import ApiError
from serve.httpserver.openai_protocol import ChatCompletionRequest, CompletionRequest
from serve.httpserver.prompts import EncodedPrompt, PromptEncoder
from serve.httpserver.request_service import ServiceSettings
from serve.httpserver.sampling import check_supported, output_limit, sampling_params, text_rules
from serve.types import SamplingParams

VOCAB = 1000
SETTINGS = ServiceSettings(0, range(4), max_total_tokens=100, vocab_size=VOCAB, end_ids=frozenset({2, 7}))


def body(**fields: object) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="p", **fields)  # type: ignore[arg-type]


def params(**fields: object) -> SamplingParams:
    return sampling_params(body(**fields), 20, SETTINGS, drawn_seed=5)


def refusal(fields: dict[str, object]) -> str | None:
    with pytest.raises(ApiError) as caught:
        params(**fields)
    assert caught.value.status == 400
    return caught.value.body()["error"]["param"]


def test_defaults_are_openai_s():
    found = params()
    assert (found.max_tokens, found.temperature, found.top_k, found.top_p, found.min_p) == (20, 1.0, 0, 1.0, 0.0)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (found.seed, found.min_tokens, found.ignore_eos, found.logit_bias) == (5, 0, False, {})


def test_a_top_p_of_zero_is_the_best_token_alone():
    found = params(top_p=0, temperature=1.5)
    assert (found.top_k, found.top_p) == (1, 1.0)


@pytest.mark.parametrize(("asked", "meant"), [(-1, 0), (0, 0), (5, 5), (10**6, VOCAB)])
def test_top_k_is_off_at_zero_and_below_and_at_most_the_vocabulary(asked: int, meant: int):
    assert params(top_k=asked).top_k == meant


def test_seeds_are_the_client_s_or_drawn_and_never_negative():
    assert params(seed=9).seed == 9
    assert params(seed=0).seed == 0
    assert params(seed=-1).seed == 2**63 - 1


def test_generation_ends_at_the_model_s_ends_unless_they_are_ignored():
    assert params(stop_token_ids=[9, 2]).stop_token_ids == [2, 7, 9]
    assert params(stop_token_ids=[9], ignore_eos=True).stop_token_ids == [9]


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"1000": 1.0}}, {"stop_token_ids": [1000]}, {"min_tokens": 21}], ids=str
)
def test_what_does_not_fit_names_its_field(fields: dict[str, object]):
    assert refusal(fields) == next(iter(fields))


def limit(num_prompt: int, asked: int | None, default: int | None = None) -> int:
    encoder = PromptEncoder(None, VOCAB, 100)  # type: ignore[arg-type]
    prompts = [EncodedPrompt(np.zeros(size, np.uint32), None) for size in (3, num_prompt)]
    return output_limit(prompts, asked, default, encoder, ("prompt", "max_tokens"))


def test_the_longest_prompt_sets_the_room():
    assert limit(40, None) == 60
    assert limit(40, None, default=16) == 16
    assert limit(95, None, default=16) == 5
    assert limit(40, 60) == 60
    assert limit(100, 0) == 0


@pytest.mark.parametrize(
    ("num_prompt", "asked", "param"), [(40, 61, "max_tokens"), (100, None, "prompt"), (100, 1, "prompt")]
)
def test_too_long_names_prompt_or_limit(num_prompt: int, asked: int | None, param: str):
    with pytest.raises(ApiError) as caught:
        limit(num_prompt, asked)
    error = caught.value.body()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_documented_fields_that_this_server_lacks_are_refused(fields: dict[str, object], param: str):
    with pytest.raises(ApiError) as caught:
        check_supported(body(**fields))
    assert caught.value.body()["error"]["param"] == param
    check_supported(body(best_of=2, n=2, suffix="", stream=True, stream_options={"include_usage": True}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_chats_have_fields_of_their_own(fields: dict[str, object], param: str):
    with pytest.raises(ApiError) as caught:
        check_supported(ChatCompletionRequest(model="m", messages=[{"role": "user"}], **fields))
    assert caught.value.body()["error"]["param"] == param


def test_text_rules_follow_the_body():
    asked = body(stop=["a", "b", "a"], include_stop_str_in_output=True, return_token_ids=True)
    rules = text_rules(asked, SamplingParams(max_tokens=5, stop_token_ids=[7], min_tokens=2, logprobs=0))
    assert [pattern.text for pattern in rules.stops] == ["a", "b"]
    assert (rules.include_stop, rules.end_ids, rules.min_tokens) == (True, {7}, 2)
    assert (rules.wants_logprobs, rules.wants_prompt_logprobs, rules.wants_token_ids) == (True, False, True)
