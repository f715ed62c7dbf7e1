"""What goes back to the HTTP processes: one batch a turn for each."""

from collections.abc import Callable

from serve.ipc.messages import Message, OutputBatch, RequestOutput, SlotReleased, TokenLogprobs
from serve.router.request import Request, RequestKey
from serve.types import CacheTier, FinishReason

_NOTHING_CACHED = [0] * len(CacheTier)


class Outputs:
    """Collects outputs and released slots by HTTP process until `flush`."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._released: dict[int, list[tuple[int, int]]] = {}

    def add(
        self,
        request: Request,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> RequestOutput:
        """One output; the first of a request tells what was cached."""
        key = request.key
        output = RequestOutput(key.slot, key.generation, token_ids, finish_reason, None, logprobs, prompt_logprobs)
        if not request.has_output:
            request.has_output = True
            output.cached_tokens = request.cached_tokens or _NOTHING_CACHED
        self._of(request.server).append(output)
        return output

    def refuse(self, server: int, key: RequestKey, error: str, code: int) -> None:
        """An output for what never became a request."""
        output = RequestOutput(key.slot, key.generation, [], FinishReason.ERROR, _NOTHING_CACHED)
        output.error, output.error_code = error, code
        self._of(server).append(output)

    def released(self, server: int, key: RequestKey) -> None:
        """Nothing names the slot any more."""
        self._released.setdefault(server, []).append((key.slot, key.generation))

    def _of(self, server: int) -> list[RequestOutput]:
        found = self._outputs.get(server)
        if found is None:
            found = self._outputs[server] = []
        return found

    def flush(self, send: Callable[[int, Message], None]) -> None:
        """Send all; outputs go before the release of their slots."""
        outputs, self._outputs = self._outputs, {}
        released, self._released = self._released, {}
        for server, batch in outputs.items():
            send(server, OutputBatch(batch))
        for server, slots in released.items():
            send(server, SlotReleased(slots))
