"""From request bodies to token ids. What takes long is encoded on a thread, so that streams go on meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from serve.httpserver.chat_template import ChatTemplateError
from serve.httpserver.errors import ApiError, bad_request
from serve.httpserver.openai_protocol import ChatMessage, ToolDefinition
from serve.httpserver.tokenizer import ServeTokenizer

# Characters, or token ids, that are encoded without a thread: well below a millisecond.
INLINE_SIZE = 4096
# What a message costs a template besides its text, as characters.
MESSAGE_SIZE = 32
PLAIN_FIELDS = {"role", "content"}
RESERVED_VARIABLES = {"self", "messages", "tools", "documents", "add_generation_prompt"}

Result = TypeVar("Result")


@dataclass(frozen=True)
class EncodedPrompt:
    """token_ids: uint32 [num_prompt]. text: as the client gave it, None when it gave ids."""

    token_ids: np.ndarray
    text: str | None


class PromptEncoder:
    """Makes prompts for one model. Raises ApiError (400) for what it cannot or may not encode."""

    def __init__(self, tokenizer: ServeTokenizer, vocab_size: int, max_total_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_total_tokens = max_total_tokens

    async def completion(self, prompt: Any, add_special_tokens: bool) -> list[EncodedPrompt]:
        """Prompts of a completion request: text, ids, or a list of either."""
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        prompts = [prompt] if is_one else prompt

        def encode() -> list[EncodedPrompt]:
            return [
                self._text(each, add_special_tokens, "prompt") if isinstance(each, str) else self._ids(each)
                for each in prompts
            ]

        return await _beside_streams(sum(len(each) for each in prompts), encode)

    async def chat(
        self,
        messages: list[ChatMessage],
        tools: list[ToolDefinition] | None,
        add_generation_prompt: bool,
        arguments: dict[str, Any],
        add_special_tokens: bool = False,
    ) -> EncodedPrompt:
        """The prompt that the model's chat template makes of messages. arguments: its further variables."""
        template = self._tokenizer.chat_template
        if template is None:
            raise bad_request("the model has no chat template; use /v1/completions", "messages")
        for name in RESERVED_VARIABLES & arguments.keys():
            raise bad_request(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
        plain = [_plain_message(message, position) for position, message in enumerate(messages)]
        known_tools = [tool.model_dump() for tool in tools] if tools and template.uses_tools else None

        def encode() -> EncodedPrompt:
            try:
                text = template.render(plain, known_tools, add_generation_prompt, **arguments)
            except ChatTemplateError as error:
                raise bad_request(str(error), "messages") from error
            return self._text(text, add_special_tokens, "messages")

        # Other fields, tools and arguments may hold anything: nobody knows what a template does with them.
        is_plain = not known_tools and not arguments and all(message.keys() <= PLAIN_FIELDS for message in plain)
        size = sum(len(message["content"]) + MESSAGE_SIZE for message in plain)
        return await _beside_streams(size if is_plain else INLINE_SIZE + 1, encode)

    async def ids_of(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text. Raises a 400 when it is so long that it cannot be a prompt anyhow."""
        return await _beside_streams(len(text), lambda: self._encode(text, add_special_tokens, param))

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        if len(text) > self._max_total_tokens * self._tokenizer.max_token_chars:
            raise self.too_long(None, param)
        return self._tokenizer.encode(text, add_special_tokens)

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises a 400 unless all ids are in the vocabulary."""
        check_prompt_ids(np.array(ids, np.uint32), self._vocab_size, param)

    def _text(self, text: str, add_special_tokens: bool, param: str) -> EncodedPrompt:
        ids = self._encode(text, add_special_tokens, param)
        self._check_length(len(ids), param)
        if not ids and self._tokenizer.bos_token_id is not None:
            ids = [self._tokenizer.bos_token_id]
        if not ids:
            raise bad_request("the prompt is empty", param)
        array = np.array(ids, np.uint32)
        check_prompt_ids(array, self._vocab_size, param)  # some tokenizers know more tokens than their model
        return EncodedPrompt(array, text)

    def _ids(self, ids: list[int]) -> EncodedPrompt:
        self._check_length(len(ids), "prompt")
        array = np.array(ids, np.uint32)
        check_prompt_ids(array, self._vocab_size, "prompt")
        return EncodedPrompt(array, None)

    def _check_length(self, num_tokens: int, param: str) -> None:
        """One prompt that is too long ends the request, whatever the others' lengths."""
        if num_tokens > self._max_total_tokens:
            raise self.too_long(num_tokens, param)

    async def text_of(self, ids: list[int], param: str) -> str:
        """The text of any number of token ids. Raises a 400 unless all are in the vocabulary."""

        def decode() -> str:
            self.check_ids(ids, param)
            return self._tokenizer.decode(ids)

        return await _beside_streams(len(ids), decode)

    def room_after(self, num_prompt: int) -> int:
        """Tokens that can be generated after a prompt; negative when it is too long itself."""
        return self._max_total_tokens - num_prompt

    def too_long(self, num_tokens: int | None, param: str) -> ApiError:
        """The 400 for a prompt that leaves no room for output."""
        found = "more" if num_tokens is None else str(num_tokens)
        limit = self._max_total_tokens
        message = f"this server's limit is {limit} tokens of prompt and output, the prompt has {found}"
        return bad_request(message, param, "context_length_exceeded")


def check_prompt_ids(prompt: np.ndarray, vocab_size: int, param: str) -> None:
    """Raises a 400 unless every id [num_prompt] is in the vocabulary."""
    if len(prompt) and int(prompt.max()) >= vocab_size:
        raise bad_request(f"token id {int(prompt.max())} is not in the vocabulary of {vocab_size}", param)


async def _beside_streams(size: int, work: Callable[[], Result]) -> Result:
    """What `work` gives; on a thread unless `size` (characters or token ids) says that it is done at once."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)


def _plain_message(message: ChatMessage, position: int) -> dict[str, Any]:
    """A message as templates expect it: text parts joined."""
    plain = message.model_dump(exclude_unset=True)
    plain["content"] = _content_text(message.content, position)
    return plain


def _content_text(content: str | list[dict[str, Any]] | None, position: int) -> str:
    if not isinstance(content, list):
        return content if content is not None else ""
    texts = []
    for number, part in enumerate(content):
        where = f"messages[{position}].content[{number}]"
        if part.get("type") != "text":
            raise bad_request("only content parts of type 'text' are supported", f"{where}.type")
        if not isinstance(part.get("text"), str):
            raise bad_request("expected a string", f"{where}.text")
        texts.append(part["text"])
    return "\n".join(texts)
