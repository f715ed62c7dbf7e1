"""One OpenAI-compatible server: request bodies out, measured answers back."""

import re
from dataclasses import dataclass, field

import msgspec

from serve.bench.flags import BenchError
from serve.bench.http_stream import Failure, FailureKind, Response, Target, exchange
from serve.bench.options import Endpoint, ServeBenchOptions
from serve.bench.prompts import Prompt
from serve.bench.sse import DONE, Choice, StreamEvent, Usage, decode_event, split_events

Messages = list[dict[str, str]]

_STEPS = re.compile(rb"^varve_router_steps_total (\S+)$", re.MULTILINE)


@dataclass
class Answer:
    """A streamed answer as the client saw it.

    start: `time.perf_counter` before connecting; event_times: of every event that brought output, the last one's
    included; failure: None when the stream ended as it should.
    """

    start: float
    end: float
    event_times: list[float] = field(default_factory=list)
    text: str = ""
    usage: Usage | None = None
    failure: Failure | None = None


class CompletionClient:
    """Sends completions (or chats) to one server."""

    def __init__(self, options: ServeBenchOptions) -> None:
        self._options = options
        self._target = Target.parse(options.base_url)
        self.model = options.model or ""

    async def resolve_model(self) -> None:
        """Ask the server for its model unless the options name one; BenchError when it does not answer."""
        if self.model:
            return
        request = self._target.encode("GET", "/v1/models", b"", self._options.api_key)
        response = await exchange(self._target, request, min(self._options.timeout, 30.0))
        problem = _response_failure(response)
        if problem is not None:
            raise BenchError(f"no answer from {self._options.base_url}/v1/models: {problem.detail}")
        try:
            self.model = str(msgspec.json.decode(response.body)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise BenchError(f"{self._options.base_url}/v1/models lists no model; name one with --model") from error

    async def num_steps(self) -> float | None:
        """Steps that a Varve server has run, by its metrics; None of other servers."""
        request = self._target.encode("GET", "/metrics", b"", self._options.api_key)
        response = await exchange(self._target, request, min(self._options.timeout, 30.0))
        found = _STEPS.search(response.body) if _response_failure(response) is None else None
        return float(found[1]) if found else None

    def body(self, prompt: Prompt | Messages, output_len: int) -> bytes:
        """The JSON body of a request."""
        options = self._options
        fields: dict[str, object] = {
            "model": self.model,
            "messages" if options.endpoint is Endpoint.CHAT else "prompt": prompt,
            "max_tokens": output_len,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields | options.extra_body)

    async def complete(self, body: bytes) -> Answer:
        """Send a body and measure the answer."""
        options = self._options
        request = self._target.encode("POST", options.endpoint.path, body, options.api_key)
        return read_answer(await exchange(self._target, request, options.timeout))


def read_answer(response: Response) -> Answer:
    """Times and text of a recorded stream."""
    answer = Answer(response.start, response.end, failure=_response_failure(response))
    if response.status != 200:
        return answer
    text: list[str] = []
    try:
        for when, payload in split_events(response.reads):
            if payload and payload != DONE:
                _take_event(answer, text, when, decode_event(payload))
    except msgspec.MsgspecError as error:
        answer.failure = answer.failure or Failure(FailureKind.PROTOCOL, f"bad event: {error}")
    answer.text = "".join(text)
    if not answer.event_times and answer.failure is None:
        answer.failure = Failure(FailureKind.NO_OUTPUT, "the stream held no output")
    return answer


def _take_event(answer: Answer, text: list[str], when: float, event: StreamEvent) -> None:
    if event.error is not None:
        detail = event.error if isinstance(event.error, str) else msgspec.json.encode(event.error).decode()
        answer.failure = Failure(FailureKind.STREAM_ERROR, detail)
    answer.usage = event.usage or answer.usage
    for choice in event.choices:
        piece = _output_of(choice)
        if piece is not None:
            text.append(piece)
            answer.event_times.append(when)


def _output_of(choice: Choice) -> str | None:
    """Text of an event that stands for generated tokens, None of one that only opens or closes a stream.

    A completion event with an empty text counts: its token is a special one, or part of a character. A chat event
    does not, for streams open with an empty one that only names the role.
    """
    if choice.delta is not None:
        delta = choice.delta
        return delta.content or delta.reasoning_content or delta.reasoning or None
    if choice.text:
        return choice.text
    return None if choice.finish_reason is not None else ""


def _response_failure(response: Response) -> Failure | None:
    if response.status not in (0, 200) and response.failure is None:
        said = " ".join(response.body.decode(errors="replace").split())[:200]
        return Failure(FailureKind.HTTP_STATUS, f"{response.status} {said}")
    return response.failure
