"""Answers of the completion routes, streamed or whole, from deltas. One class an API; routes only choose."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from serve.httpserver.generation import UsageCount
from serve.httpserver.logprobs import ChatLogprobsFormat, CompletionLogprobs, prompt_offsets
from serve.httpserver.prompts import EncodedPrompt
from serve.httpserver.sequence import Delta, ScoredToken
from serve.httpserver.tokenizer import ServeTokenizer
from serve.ipc.messages import TokenLogprobs
from serve.types import CacheTier

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def json_response(data: Any) -> Response:
    """Plain data as a 200."""
    return Response(encode_json(data), media_type="application/json")


def usage_dict(usage: UsageCount) -> dict[str, Any]:
    """`usage` as OpenAI has it, with the tiers beside cached_tokens."""
    by_tier = {tier.name.lower(): usage.cached[tier] for tier in CacheTier}
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached), "cached_tokens_by_tier": by_tier},
    }


@dataclass
class _Whole:
    """What the deltas of one sequence add up to."""

    text: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.ending is not None:
            self.finish_reason = delta.ending.value


class Answer(ABC):
    """Turns deltas into bytes. `chunk` and `end` for a stream; `whole` for one body.

    A stream's chunks are put together from parts encoded once, because this runs for every token of every stream.
    """

    object_name: str
    id_prefix: str

    def __init__(
        self, request_id: str, model: str, with_logprobs: bool, stream_usage: bool, with_token_ids: bool = False
    ) -> None:
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._stream_usage = stream_usage
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        opening = encode_json({**self._head, "object": self.object_name + self.chunk_suffix})
        self._opening = b"data: " + opening[:-1] + b',"choices":[{"index":'
        self._closing = b'}],"usage":null}\n\n' if stream_usage else b"}]}\n\n"

    chunk_suffix = ""

    def _token_ids(self, whole: _Whole) -> dict[str, Any]:
        return {"token_ids": whole.token_ids} if self._with_token_ids else {}

    def _ids_part(self, delta: Delta) -> bytes:
        """The end of a streamed choice: its token ids, where they were asked for."""
        return b',"token_ids":' + encode_json(delta.token_ids) if self._with_token_ids else b""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """Events of a stream for one delta; empty when there is nothing to see."""

    @abstractmethod
    def choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        """One entry of `choices` of a whole answer."""

    def end(self, usage: UsageCount) -> bytes:
        """The last events of a stream."""
        if not self._stream_usage:
            return DONE
        last = {**self._head, "object": self.object_name + self.chunk_suffix, "choices": [], "usage": usage_dict(usage)}
        return b"data: " + encode_json(last) + b"\n\n" + DONE

    def whole(self, deltas: list[Delta], num_choices: int, usage: UsageCount) -> bytes:
        """The body of an answer that is not streamed."""
        wholes = [_Whole() for _ in range(num_choices)]
        for delta in deltas:
            wholes[delta.index].add(delta)
        choices = [self.choice(index, whole) for index, whole in enumerate(wholes)]
        body = {**self._head, "object": self.object_name, "choices": choices, "usage": usage_dict(usage)}
        return encode_json(body)


def error_event(body: dict[str, Any]) -> bytes:
    """An error in the middle of a stream."""
    return b"data: " + encode_json(body) + b"\n\n"


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_suffix = ".chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        tokenizer: ServeTokenizer,
        request_id: str,
        model: str,
        with_logprobs: bool,
        stream_usage: bool,
        with_token_ids: bool = False,
    ) -> None:
        super().__init__(request_id, model, with_logprobs, stream_usage, with_token_ids)
        self._logprobs = ChatLogprobsFormat(tokenizer)
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        parts = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            parts.append(self._event(delta.index, b'{"role":"assistant","content":""}', b"null", b"null"))
        ids = self._ids_part(delta)
        if delta.text or delta.tokens or delta.token_ids:
            content = b'{"content":' + encode_json(delta.text) + b"}"
            parts.append(self._event(delta.index, content, self._scores(delta.tokens), b"null" + ids))
        if delta.ending is not None:
            parts.append(self._event(delta.index, b"{}", b"null", encode_json(delta.ending.value)))
        return b"".join(parts)

    def _event(self, index: int, delta: bytes, scores: bytes, reason: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._opening,
            index,
            delta,
            scores,
            reason,
            self._closing,
        )

    def _scores(self, tokens: list[ScoredToken]) -> bytes:
        if not self._with_logprobs:
            return b"null"
        return encode_json({"content": self._logprobs.entries(tokens), "refusal": None})

    def choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        scores = {"content": self._logprobs.entries(whole.tokens), "refusal": None} if self._with_logprobs else None
        message = {"role": "assistant", "content": "".join(whole.text), "refusal": None}
        choice = {"index": index, "message": message, "logprobs": scores, "finish_reason": whole.finish_reason}
        return choice | self._token_ids(whole)


class CompletionAnswer(Answer):
    """/v1/completions. echo: prompts by position, where the answer repeats them; n: sequences a prompt."""

    object_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        tokenizer: ServeTokenizer,
        request_id: str,
        model: str,
        with_logprobs: bool,
        stream_usage: bool,
        echo: list[EncodedPrompt] | None = None,
        n: int = 1,
        with_token_ids: bool = False,
    ) -> None:
        super().__init__(request_id, model, with_logprobs, stream_usage, with_token_ids)
        self._tokenizer = tokenizer
        self._echo = echo
        self._echoed: dict[int, str] = {}  # by prompt, once asked for: a stream asks with every token
        self._n = n
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        text, scores = delta.text, b"null"
        is_first = delta.index not in self._begun
        if self._with_logprobs:
            prompt_scores = delta.prompt_logprobs if is_first else None
            scores = encode_json(self._scores(delta.index, delta.tokens, prompt_scores))
        if is_first:
            self._begun.add(delta.index)
            text = self._echoed_text(delta.index) + text
        reason = b"null" if delta.ending is None else encode_json(delta.ending.value)
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._opening,
            delta.index,
            encode_json(text),
            scores,
            reason,
            self._ids_part(delta),
            self._closing,
        )

    def choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        scores = self._scores(index, whole.tokens, whole.prompt_logprobs) if self._with_logprobs else None
        text = self._echoed_text(index) + "".join(whole.text)
        choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": whole.finish_reason}
        return choice | self._token_ids(whole)

    def _echoed_text(self, index: int) -> str:
        if self._echo is None:
            return ""
        number = index // self._n
        text = self._echoed.get(number)
        if text is None:
            prompt = self._echo[number]
            text = self._tokenizer.decode(prompt.token_ids.tolist()) if prompt.text is None else prompt.text
            self._echoed[number] = text
        return text

    def _scores(self, index: int, tokens: list[ScoredToken], of_prompt: list[TokenLogprobs] | None) -> dict[str, Any]:
        found = CompletionLogprobs(self._tokenizer)
        text = self._echoed_text(index)
        if of_prompt is not None and self._echo is not None:
            prompt = self._echo[index // self._n].token_ids
            found.add_prompt(prompt, prompt_offsets(self._tokenizer, prompt, text), of_prompt)
        found.add_generated(tokens, len(text))
        return found.to_dict()
