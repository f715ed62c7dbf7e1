"""One generated sequence: what the router's outputs mean as text. A request has one for each prompt and choice."""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

from serve.httpserver.detokenizer import Detokenizer
from serve.httpserver.stop_strings import StopPattern, StopScanner
from serve.ipc.messages import RequestOutput, TokenLogprobs
from serve.types import FinishReason


class Ending(Enum):
    """Why a sequence is complete, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probabilities; [start, end) are its characters in the generated text."""

    scores: TokenLogprobs
    start: int
    end: int


@dataclass(slots=True)
class Delta:
    """What one step added to the sequence `index` of a request.

    prompt_logprobs: of all prompt tokens after the first, with the first delta, where they were asked for. token_ids:
    those that the model generated, whether or not their text is out yet.
    """

    index: int
    text: str
    tokens: list[ScoredToken] = field(default_factory=list)
    ending: Ending | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TextRules:
    """How tokens become text; shared by all sequences of a request.

    end_ids: tokens that end a sequence and do not belong to its text. keep_tokens: False when only the prompt's scores
    are wanted. wants_*: whether outputs carry log-probabilities, and answers the ids of generated tokens.
    """

    stops: Items[StopPattern] = ()
    include_stop: bool = False
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    keep_tokens: bool = True
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    wants_token_ids: bool = False


class Sequence:
    """Text, counts and ending of one sequence.

    num_tokens: generated tokens that count. cached_tokens: by tier, None until known. ended_here: a stop string ended
    it, which the router does not know yet.
    """

    def __init__(self, index: int, rules: TextRules, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.cached_tokens: list[int] | None = None
        self.ending: Ending | None = None
        self.ended_here = False
        self._rules = rules
        self._detokenizer = detokenizer
        self._scanner = StopScanner(rules.stops, rules.include_stop) if rules.stops else None
        self._pending: deque[ScoredToken] = deque()
        self._num_decoded = 0
        self._num_emitted = 0
        self._prompt_logprobs: list[TokenLogprobs] | None = [] if rules.wants_prompt_logprobs else None

    def advance(self, output: RequestOutput) -> Delta | None:
        """Take one output (without error); None when it gives a client nothing to see."""
        before = self.num_tokens
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        if self._rules.keep_tokens:
            text = self._take_tokens(output)
            if output.finish_reason is not None and self.ending is None:
                text += self._finish(output.finish_reason)
        else:
            text = ""
            self.ending = None if output.finish_reason is None else Ending.LENGTH
        self._num_emitted += len(text)
        tokens = self._released_tokens() if self._pending else []
        ready = bool(output.token_ids) or self.ending is not None
        token_ids = output.token_ids[: self.num_tokens - before] if self._rules.wants_token_ids else []
        if not (text or tokens or token_ids or self.ending or (ready and self._prompt_logprobs is not None)):
            return None
        delta = Delta(self.index, text, tokens, self.ending, self._prompt_logprobs, token_ids)
        self._prompt_logprobs = None
        return delta

    def _take_tokens(self, output: RequestOutput) -> str:
        token_ids = output.token_ids
        if self._scanner is None and output.logprobs is None:
            text = self._detokenizer.feed(self._visible(output))
            self.num_tokens += len(token_ids)
            self._num_decoded += len(text)
            return text
        num_visible = len(self._visible(output))
        pieces = []
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if position >= num_visible:
                break
            pieces.append(self._take_token(token_id, output.logprobs[position] if output.logprobs else None))
            if self._scanner is not None and self._scanner.stopped:
                self.ending = Ending.STOP
                self.ended_here = output.finish_reason is None
                break
        return "".join(pieces)

    def _visible(self, output: RequestOutput) -> list[int]:
        """The output's tokens without the one that ended the sequence."""
        token_ids = output.token_ids
        ends = output.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._rules.end_ids
        return token_ids[:-1] if ends and not self._rules.include_stop else token_ids

    def _take_token(self, token_id: int, scores: TokenLogprobs | None) -> str:
        text = self._detokenizer.feed((token_id,))
        if scores is not None and self._rules.wants_logprobs:
            self._pending.append(ScoredToken(scores, self._num_decoded, self._num_decoded + len(text)))
        self._num_decoded += len(text)
        if self._scanner is None or self.num_tokens <= self._rules.min_tokens:
            return text
        return self._scanner.feed(text)

    def _finish(self, reason: FinishReason) -> str:
        self.ending = Ending.STOP if reason is FinishReason.STOP else Ending.LENGTH
        return "" if self._scanner is None else self._scanner.flush()

    def _released_tokens(self) -> list[ScoredToken]:
        """Scores of tokens whose text has been emitted. At the end those of cut-off text are dropped."""
        cut = self._scanner is not None and self._scanner.stopped
        released = []
        while self._pending:
            token = self._pending[0]
            if token.end > self._num_emitted and not (self.ending and (not cut or token.start < self._num_emitted)):
                break
            released.append(self._pending.popleft())
        return released
