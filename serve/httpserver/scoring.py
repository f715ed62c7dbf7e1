"""Completions with max_tokens 0: no token is generated, at most the prompt is scored."""

from dataclasses import replace

import msgspec
from starlette.responses import Response

from serve.httpserver.answers import Answer
from serve.httpserver.generation import GenerationSpec, UsageCount
from serve.httpserver.request_service import RequestService
from serve.httpserver.sequence import Delta, Ending
from serve.httpserver.streaming import EventStream, WholeAnswer
from serve.types import CacheTier


def prompt_only(
    service: RequestService, spec: GenerationSpec, answer: Answer, stream: bool, wants_scores: bool
) -> Response:
    """The answer to a request for no tokens.

    Scoring the prompt takes one step of the engine, whose token is dropped; everything else needs no engine at all.
    Raises ApiError like `RequestService.start`.
    """
    if wants_scores:
        one_step = msgspec.structs.replace(spec.sampling, max_tokens=1, logprobs=None, min_tokens=0)
        rules = replace(spec.rules, keep_tokens=False, stops=())
        generation = service.start(replace(spec, sampling=one_step, rules=rules))
        return (EventStream if stream else WholeAnswer)(service, generation, answer)
    service.check_ready()
    num_choices = len(spec.prompts) * spec.n
    deltas = [Delta(index, "", ending=Ending.LENGTH) for index in range(num_choices)]
    usage = UsageCount(sum(len(prompt) for prompt in spec.prompts), 0, (0,) * len(CacheTier))
    if not stream:
        return Response(answer.whole(deltas, num_choices, usage), media_type="application/json")
    events = b"".join(answer.chunk(delta) for delta in deltas) + answer.end(usage)
    return Response(events, media_type="text/event-stream")
