"""Prompts in all their forms become token ids, or a 400 that names the field."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve.httpserver import prompts as module
from serve.httpserver.errors import ApiError
from serve.httpserver.openai_protocol import ChatMessage
from serve.httpserver.prompts import PromptEncoder
from serve.httpserver.tokenizer import ServeTokenizer

CONTEXT = 100


@pytest.fixture
def encoder(tokenizer: ServeTokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, tokenizer.vocab_size, CONTEXT)


def ids(encoder: PromptEncoder, prompt: Any) -> list[list[int]]:
    return [each.token_ids.tolist() for each in asyncio.run(encoder.completion(prompt, True))]


def refusal(call: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        asyncio.run(call())
    assert caught.value.status == 400
    error = caught.value.body()["error"]
    return error["param"], error["code"]


def test_text_ids_and_lists_of_both(encoder: PromptEncoder, tokenizer: ServeTokenizer):
    hello, world = (tokenizer.encode(text, True) for text in ("Hello", " world"))
    assert ids(encoder, "Hello") == [hello]
    assert ids(encoder, ["Hello", " world"]) == [hello, world]
    assert ids(encoder, [5, 6]) == [[5, 6]]
    assert ids(encoder, [[5], [6, 7]]) == [[5], [6, 7]]
    (text,) = asyncio.run(encoder.completion("Hello", True))
    (plain,) = asyncio.run(encoder.completion([5], True))
    assert (text.text, plain.text) == ("Hello", None)


def test_an_empty_text_is_the_begin_token(encoder: PromptEncoder, tokenizer: ServeTokenizer):
    assert ids(encoder, "") == [[tokenizer.bos_token_id]]


def test_prompts_beyond_the_context_or_the_vocabulary_are_refused(tokenizer: ServeTokenizer, encoder: PromptEncoder):
    too_long = ("prompt", "context_length_exceeded")
    assert refusal(lambda: encoder.completion("word " * 101, True)) == too_long
    assert refusal(lambda: encoder.completion("x" * 10**6, True)) == too_long
    assert refusal(lambda: encoder.completion(["a", "word " * 101], True)) == too_long
    assert refusal(lambda: encoder.completion([1] * 101, True)) == too_long
    assert refusal(lambda: encoder.completion([tokenizer.vocab_size], True))[0] == "prompt"
    assert encoder.room_after(CONTEXT) == 0


def test_tokens_that_the_model_lacks_are_refused_in_texts_too(tokenizer: ServeTokenizer):
    """Else they would read beyond the embedding, and take the worker down with all its requests."""
    small = PromptEncoder(tokenizer, 10, CONTEXT)
    assert refusal(lambda: small.completion("Hello", True))[0] == "prompt"


def test_chats_go_through_the_template(encoder: PromptEncoder, tokenizer: ServeTokenizer):
    messages = [ChatMessage(role="user", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    prompt = asyncio.run(encoder.chat(messages, None, True, {}))
    assert prompt.text is not None
    assert prompt.text.endswith("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.token_ids.tolist() == tokenizer.encode(prompt.text, False)
    without = asyncio.run(encoder.chat(messages, None, False, {}))
    assert prompt.text == f"{without.text}<|im_start|>assistant\n"


def test_parts_and_variables_that_templates_cannot_have_are_named(encoder: PromptEncoder):
    image = [ChatMessage(role="user", content=[{"type": "image_url"}])]
    assert refusal(lambda: encoder.chat(image, None, True, {}))[0] == "messages[0].content[0].type"
    number = [ChatMessage(role="user", content=[{"type": "text", "text": 5}])]
    assert refusal(lambda: encoder.chat(number, None, True, {}))[0] == "messages[0].content[0].text"
    plain = [ChatMessage(role="user", content="a")]
    assert refusal(lambda: encoder.chat(plain, None, True, {"messages": []}))[0] == "chat_template_kwargs"


def test_ids_become_text(encoder: PromptEncoder, tokenizer: ServeTokenizer):
    assert asyncio.run(encoder.text_of(tokenizer.encode("Hello there", False), "tokens")) == "Hello there"
    assert refusal(lambda: encoder.text_of([tokenizer.vocab_size], "tokens"))[0] == "tokens"


def test_what_takes_long_is_encoded_on_a_thread_with_the_same_result(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
):
    messages = [ChatMessage(role="user", content="Hi")]
    before = ids(encoder, ["Hello", "you"]), asyncio.run(encoder.chat(messages, None, True, {})).text
    monkeypatch.setattr(module, "INLINE_SIZE", 0)
    assert (ids(encoder, ["Hello", "you"]), asyncio.run(encoder.chat(messages, None, True, {})).text) == before
