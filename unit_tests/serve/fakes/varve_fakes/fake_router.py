"""A router without an engine: answers each submitted request with scripted tokens, a step at a time."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from serve.httpserver.request_service import RequestService
from serve.ipc.channel import ChannelFullError
from serve.ipc.messages import (
    AbortRequest,
    FinishRequest,
    Message,
    OutputBatch,
    RequestOutput,
    SlotReleased,
    SubmitRequest,
    TokenLogprobs,
)
from serve.ipc.request_table import RequestTable
from serve.types import FinishReason, SamplingParams


@dataclass
class FakeRequest:
    """A request in the fake engine. choice: position among the requests submitted so far."""

    message: SubmitRequest
    prompt: list[int]
    sampling: SamplingParams
    names: list[bytes]
    choice: int
    tokens: Iterator[int] = field(default_factory=lambda: iter(()))
    num_generated: int = 0


Script = Callable[[FakeRequest], Sequence[int]]


class FakeRouter:
    """Takes messages like an Outbox, gives outputs to the service. Steps by itself while `auto` is set.

    script: tokens of a request; after them it ends, with STOP when `stops`, else with LENGTH; max_tokens ends it too.
    cached: by tier, of every request. refuse: (status, text) for every request. full: sends raise.
    """

    def __init__(self, table: RequestTable, script: Script | None = None) -> None:
        self.table = table
        self.script: Script = script or (lambda request: [])
        self.service: RequestService | None = None
        self.auto = True
        self.stops = True
        self.full = False
        self.cached = [0, 0, 0]
        self.refuse: tuple[int, str] | None = None
        self.tokens_a_step = 1
        self.step_s = 0.0
        self.messages: list[Message] = []
        self.running: dict[int, FakeRequest] = {}
        self.seen: list[FakeRequest] = []
        self._stepping: asyncio.Task[None] | None = None

    # As the service's Sender.

    def send(self, message: Message) -> None:
        if self.full:
            raise ChannelFullError("full")
        self.messages.append(message)
        match message:
            case SubmitRequest():
                self._submit(message)
            case FinishRequest() | AbortRequest():
                self._end(message.slot, message.generation)

    def close(self) -> None:
        self.running.clear()

    def of_type(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.messages if isinstance(message, kind)]

    def _submit(self, message: SubmitRequest) -> None:
        slot = message.slot
        prompt = self.table.tokens(slot)[: self.table.num_prompt(slot)].tolist()
        request = FakeRequest(message, prompt, self.table.sampling(slot), list(self.table.names(slot)), len(self.seen))
        request.tokens = iter(self.script(request))
        self.seen.append(request)
        self.running[slot] = request
        if self.auto and (self._stepping is None or self._stepping.done()):
            self._stepping = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.running and self.auto:
            await asyncio.sleep(self.step_s)
            self.step()

    def _end(self, slot: int, generation: int) -> None:
        request = self.running.get(slot)
        if request is not None and request.message.generation == generation:
            del self.running[slot]
        self._release([(slot, generation)])

    def _release(self, slots: list[tuple[int, int]]) -> None:
        for slot, generation in slots:
            self.table.mark_released(slot, generation)
        service = self.service
        if service is not None and slots:
            asyncio.get_running_loop().call_soon(service.handle, [SlotReleased(slots)])

    def step(self) -> None:
        """One step of the fake engine: a token for every running request, in one batch."""
        assert self.service is not None
        outputs = [self._output(request) for request in list(self.running.values())]
        ended = [(output.slot, output.generation) for output in outputs if output.finish_reason is not None]
        for slot, _ in ended:
            self.running.pop(slot, None)
        if outputs:
            self.service.handle([OutputBatch(outputs)])
        self._release(ended)

    def _output(self, request: FakeRequest) -> RequestOutput:
        output = RequestOutput(request.message.slot, request.message.generation, [])
        if self.refuse is not None:
            output.finish_reason, (output.error_code, output.error) = FinishReason.ERROR, self.refuse
            return output
        if request.num_generated == 0:
            output.cached_tokens = list(self.cached)
            if request.sampling.prompt_logprobs is not None:
                output.prompt_logprobs = [
                    scores_of(token, request.sampling.prompt_logprobs) for token in request.prompt[1:]
                ]
        for _ in range(self.tokens_a_step):
            self._next_token(request, output)
            if output.finish_reason is not None:
                break
        if request.sampling.logprobs is not None:
            output.logprobs = [scores_of(token, request.sampling.logprobs) for token in output.token_ids]
        return output

    def _next_token(self, request: FakeRequest, output: RequestOutput) -> None:
        token = next(request.tokens, None)
        if token is None:
            output.finish_reason = FinishReason.STOP if self.stops else FinishReason.LENGTH
            return
        output.token_ids.append(token)
        request.num_generated += 1
        if token in request.sampling.stop_token_ids:
            output.finish_reason = FinishReason.STOP
        elif request.num_generated >= request.sampling.max_tokens:
            output.finish_reason = FinishReason.LENGTH


def scores_of(token: int, num_top: int) -> TokenLogprobs:
    """Made-up scores: the token itself is the best, its neighbours follow."""
    tops = [token + offset for offset in range(num_top)]
    return TokenLogprobs(token, -0.5, 1, tops, [-0.5 - offset for offset in range(num_top)])
