"""Log-probabilities in the shapes of both completion APIs."""

import math
from typing import Any

import numpy as np

from serve.httpserver.sequence import ScoredToken
from serve.httpserver.tokenizer import ServeTokenizer
from serve.ipc.messages import TokenLogprobs

# What OpenAI gives for a probability of zero; JSON has no infinity.
LOWEST = -9999.0


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def _token_key(token: bytes) -> str:
    """The token's text; bytes that are none are written out, so that different tokens have different keys."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class ChatLogprobsFormat:
    """`choices[].logprobs.content` entries."""

    def __init__(self, tokenizer: ServeTokenizer) -> None:
        self._token_text = tokenizer.token_text

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token_text(token_id)
        return {"token": token.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(token)}

    def entries(self, tokens: list[ScoredToken]) -> list[dict[str, Any]]:
        """One entry a token, with the alternatives asked for."""
        found = []
        for token in tokens:
            scores = token.scores
            entry = self._entry(scores.token_id, scores.logprob)
            tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
            entry["top_logprobs"] = [self._entry(token_id, logprob) for token_id, logprob in tops]
            found.append(entry)
        return found


class CompletionLogprobs:
    """`choices[].logprobs` of the completions API: four parallel lists."""

    def __init__(self, tokenizer: ServeTokenizer) -> None:
        self._token_text = tokenizer.token_text
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def add_generated(self, tokens: list[ScoredToken], base: int) -> None:
        """Generated tokens; base: characters of echoed prompt before them."""
        for token in tokens:
            self._add(token.scores, base + token.start)

    def add_prompt(self, prompt: np.ndarray, offsets: list[int], scores: list[TokenLogprobs]) -> None:
        """The echoed prompt [num_prompt]: its first token has no probability, scores are of the others."""
        self.tokens.append(_token_key(self._token_text(int(prompt[0]))))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(offsets[0])
        for entry, offset in zip(scores, offsets[1:], strict=False):
            self._add(entry, offset)

    def _add(self, scores: TokenLogprobs, offset: int) -> None:
        key = _token_key(self._token_text(scores.token_id))
        tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
        top = {_token_key(self._token_text(token_id)): _finite(logprob) for token_id, logprob in tops}
        top.setdefault(key, _finite(scores.logprob))
        self.tokens.append(key)
        self.token_logprobs.append(_finite(scores.logprob))
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


def prompt_offsets(tokenizer: ServeTokenizer, prompt: np.ndarray, text: str) -> list[int]:
    """Where each prompt token [num_prompt] begins in the echoed text.

    Tokens that encoding has put before the text (BOS, a leading space) take no room in it.
    """
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    starts, length = [], 0
    for token_id in prompt.tolist():
        starts.append(length)
        length += len(detokenizer.feed((token_id,)))
    before = length - len(text)
    return [max(0, start - before) for start in starts]
