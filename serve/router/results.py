"""What a finished plan says, applied to its requests: tokens, ends, log-probabilities, failures."""

from collections.abc import Callable, Sequence

from serve.hashing import PageHasher
from serve.ipc.messages import StepResult, TokenLogprobs
from serve.router.outputs import Outputs
from serve.router.planner import Planner
from serve.router.request import Request
from serve.router.statistics import RouterStatistics
from serve.router.step_plan import PlanRecord
from serve.types import FinishReason

Finish = Callable[[Request, FinishReason], None]
Fail = Callable[[Request, str], None]


def name_pages(request: Request, hasher: PageHasher) -> None:
    """Name the full pages of known tokens that have no name yet."""
    size = hasher.page_size
    for start in range(len(request.names) * size, request.num_tokens - size + 1, size):
        parent = request.names[-1] if request.names else request.root
        request.names.append(hasher.page(parent, request.tokens[start : start + size]))


class ResultReader:
    """Applies results. `finish` and `fail` are called when a request ends; its output of the step is made before."""

    def __init__(
        self,
        planner: Planner,
        hasher: PageHasher,
        outputs: Outputs,
        statistics: RouterStatistics,
        finish: Finish,
        fail: Fail,
    ) -> None:
        self._planner = planner
        self._hasher = hasher
        self._outputs = outputs
        self._statistics = statistics
        self._finish = finish
        self._fail = fail

    def apply(self, record: PlanRecord, result: StepResult, now: float) -> None:
        """Tokens of requests that ended meanwhile are dropped."""
        dropped = 0
        for row, token in zip(result.rows, result.token_ids, strict=True):
            request = record.rows[row]
            if request is None or request.finish_reason is not None:
                dropped += 1
                continue
            if request.num_tokens == request.num_prompt:
                self._statistics.first_token_s.observe(now - request.arrival)
            reason = self._accept(request, token)
            self._output(request, row, [token], reason, result)
            if reason is not None:
                self._finish(request, reason)
        self._statistics.num_generated_tokens += len(result.rows) - dropped
        self._statistics.num_dropped_tokens += dropped
        if result.prompt_logprobs:
            self._prompt_only(record, result)
        for row, error in result.failed_rows.items():
            request = record.rows[row]
            if request is not None and request.finish_reason is None:
                self._statistics.num_failed_rows += 1
                self._fail(request, error)

    def _accept(self, request: Request, token: int) -> FinishReason | None:
        """Append a token; says whether it is the last."""
        request.tokens[request.num_tokens] = token
        request.num_tokens = num_tokens = request.num_tokens + 1
        if num_tokens % self._hasher.page_size == 0:
            name_pages(request, self._hasher)
            self._planner.publish_ready(request)
        if token in request.stop_ids and num_tokens - request.num_prompt >= request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= request.limit else None

    def _output(
        self, request: Request, row: int, tokens: list[int], reason: FinishReason | None, result: StepResult
    ) -> None:
        logprobs: list[TokenLogprobs] | None = None
        if result.logprobs and (entry := result.logprobs.get(row)) is not None:
            logprobs = [entry]
        prompt: list[TokenLogprobs] | None = None
        if result.prompt_logprobs and (entries := result.prompt_logprobs.get(row)) is not None:
            prompt = _not_told(request, entries)
        self._outputs.add(request, tokens, reason, logprobs, prompt)

    def _prompt_only(self, record: PlanRecord, result: StepResult) -> None:
        """Rows whose chunk was not the last of the prompt have log-probabilities but no token."""
        for row in _without(result.prompt_logprobs, result.rows):
            request = record.rows[row]
            if request is not None and request.finish_reason is None:
                self._output(request, row, [], None, result)


def _not_told(request: Request, entries: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """Prompt entries that the client has not: a request that joins again computes its prompt again."""
    num_told = max(0, request.num_scored - request.num_scored_here)
    request.num_scored_here += len(entries)
    request.num_scored = max(request.num_scored, request.num_scored_here)
    return entries[num_told:]


def _without(rows: dict[int, list[TokenLogprobs]], sampled: Sequence[int]) -> list[int]:
    return [row for row in rows if row not in sampled]
