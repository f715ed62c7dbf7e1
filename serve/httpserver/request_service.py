"""The HTTP process's side of the engine: slots, submission, and the way of outputs back to their requests.

Runs on the event loop's thread only. A batch of outputs is handled in one go: tokens become text, stop strings are
told to the router, and each request's consumer wakes up once.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from serve.hashing import PageHasher
from serve.httpserver.errors import ApiError, bad_request, overloaded, unavailable
from serve.httpserver.generation import Generation, GenerationSpec, failure_of
from serve.httpserver.metrics import HttpMetrics
from serve.httpserver.sequence import Sequence
from serve.httpserver.slot_pool import SlotPool
from serve.httpserver.tokenizer import ServeTokenizer
from serve.ipc.channel import ChannelFullError
from serve.ipc.messages import (
    AbortRequest,
    FinishRequest,
    Message,
    OutputBatch,
    RequestOutput,
    SlotReleased,
    SubmitRequest,
)
from serve.ipc.request_table import RequestTable
from serve.types import CacheTier, FinishReason

logger = logging.getLogger(__name__)
SEED_MASK = 2**63 - 1
DOWN_REASON = "the engine is not ready"
STOPPING_REASON = "the server is stopping"


class Sender(Protocol):
    """A way to the router's mailbox."""

    def send(self, message: Message) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ServiceSettings:
    """Numbers of this server.

    server: index of this HTTP process. owned: its slots. max_total_tokens: prompt and output of one request.
    vocab_size: of the model. end_ids: tokens that end a generation. base_seed: of requests that name no seed.
    """

    server: int
    owned: range
    max_total_tokens: int
    vocab_size: int
    end_ids: frozenset[int]
    request_timeout_s: float = 3600.0
    base_seed: int | None = None


@dataclass(slots=True)
class _Active:
    """Who waits for the outputs of a slot."""

    generation: int
    sequence: Sequence
    request: Generation
    last_output_at: float


class RequestService:
    """Starts generations and feeds them. Is down until the first `engine_up`."""

    def __init__(
        self,
        settings: ServiceSettings,
        table: RequestTable,
        tokenizer: ServeTokenizer,
        connect: Callable[[int], Sender],
        metrics: HttpMetrics,
    ) -> None:
        """connect: gives the way to the router of an epoch."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._table = table
        self._connect = connect
        self._pool = SlotPool(table, settings.owned)
        self._router: Sender | None = None
        self._hasher: PageHasher | None = None
        self._down_reason = DOWN_REASON
        self._active: dict[int, _Active] = {}
        self._filled: dict[int, int] = {}  # slot -> generation, since the last engine_up
        seed = settings.base_seed
        self._seeds = random.Random(None if seed is None else f"{seed}/{settings.server}")

    # --- engine's state ---------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether requests are taken."""
        return self._router is not None

    @property
    def num_active(self) -> int:
        """Sequences in the engine."""
        return len(self._active)

    @property
    def num_free_slots(self) -> int:
        """Slots that a request can take at once."""
        return self._pool.num_free

    def engine_up(self, epoch: int, namespace: bytes, key: bytes) -> None:
        """Requests go to the router of `epoch` from now on; pages are named with `namespace` and `key`."""
        self._fail_all("the engine was restarted")
        self._close_router()
        self._router = self._connect(epoch)
        self._hasher = PageHasher(key, namespace, self._table.shape.page_size)
        self._hand_in_lost_slots()
        self._pool.rescan()

    def _hand_in_lost_slots(self) -> None:
        """Let the new router release slots that were filled after it had released all, for a router already dead."""
        filled, self._filled = self._filled, {}
        for slot, generation in filled.items():
            if not self._table.is_free(slot):
                self._hand_in(slot, generation)

    def _hand_in(self, slot: int, generation: int) -> None:
        """Let the router release a filled slot that nobody waits for."""
        self._send(SubmitRequest(slot, generation, self.settings.server, "lost"))
        self._send(AbortRequest(slot, generation))

    def engine_down(self, reason: str) -> None:
        """Fail what runs, and refuse requests until the next `engine_up`."""
        self._close_router()
        self._down_reason = f"the engine is restarting: {reason}" if reason else DOWN_REASON
        self._fail_all(self._down_reason)

    def shut_down(self) -> None:
        """Fail what runs, and refuse requests for good."""
        for request in {id(active.request): active.request for active in self._active.values()}.values():
            self._abort(request)
            request.fail(unavailable(STOPPING_REASON))
        self.engine_down("")
        self._down_reason = STOPPING_REASON

    def _close_router(self) -> None:
        if self._router is not None:
            self._router.close()
            self._router = None

    def _fail_all(self, reason: str) -> None:
        waiting = list(self._active.values())
        for slot in list(self._active):
            self._forget(slot)
        for active in waiting:
            active.request.fail(unavailable(reason))

    # --- starting and ending requests -------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raises a 503 while the engine is down."""
        if self._router is None:
            raise unavailable(self._down_reason)

    def new_seed(self) -> int:
        """The seed of a request that names none."""
        return self._seeds.getrandbits(63)

    def start(self, spec: GenerationSpec) -> Generation:
        """Fill slots and submit. Raises ApiError: 400, 429 without free slots, 503 while the engine is down."""
        self.check_ready()
        count = len(spec.prompts) * spec.n
        if count > self._pool.num_owned:
            limit = self._pool.num_owned
            raise bad_request(f"n times the number of prompts is {count}, the server's limit is {limit}", "n")
        slots = self._pool.take(count)
        if slots is None:
            raise overloaded("the server has no room for this request now")
        return self._start_in(spec, slots)

    def _start_in(self, spec: GenerationSpec, slots: list[int]) -> Generation:
        sequences = [
            Sequence(index, spec.rules, self.tokenizer.detokenizer(spec.skip_special_tokens))
            for index in range(len(slots))
        ]
        request = Generation(spec, sequences, self._abort)
        try:
            messages = self._fill(spec, slots)
        except ValueError as error:
            self._give_back(slots)
            raise bad_request(f"the request does not fit: {error}") from error
        request.slots = slots
        now = time.monotonic()
        for slot, message, sequence in zip(slots, messages, sequences, strict=True):
            self._active[slot] = _Active(message.generation, sequence, request, now)
        self._submit(request, messages)
        self._set_deadline(request)
        return request

    def _fill(self, spec: GenerationSpec, slots: list[int]) -> list[SubmitRequest]:
        assert self._hasher is not None
        salt = None if spec.cache_salt is None else spec.cache_salt.encode()
        root = self._hasher.root(None, salt)
        messages = []
        for number, prompt in enumerate(spec.prompts):
            names = self._hasher.chain(root, prompt)
            for choice in range(spec.n):
                slot = slots[number * spec.n + choice]
                sampling = msgspec.structs.replace(spec.sampling, seed=(spec.sampling.seed + choice) & SEED_MASK)
                generation = self._filled[slot] = self._table.fill(slot, prompt, sampling, root, names)
                server = self.settings.server
                messages.append(SubmitRequest(slot, generation, server, spec.request_id, spec.priority))
        return messages

    def _give_back(self, slots: list[int]) -> None:
        """Slots of a request that could not be filled; those that were already come back through the router."""
        for slot in slots:
            if self._table.is_free(slot):
                self._pool.put_back(slot)
            else:
                self._pool.let_go(slot)
                self._hand_in(slot, self._filled[slot])

    def _submit(self, request: Generation, messages: list[SubmitRequest]) -> None:
        assert self._router is not None
        try:
            for message in messages:
                self._router.send(message)
        except ChannelFullError as error:
            self._abort(request)
            raise unavailable("the router does not take requests") from error

    def _set_deadline(self, request: Generation) -> None:
        timeout_s = self.settings.request_timeout_s

        def expire() -> None:
            if not request.is_finished:
                self._abort(request)
                request.fail(ApiError(504, f"the request took longer than {timeout_s:g} s", code="timeout"))

        request.deadline = asyncio.get_running_loop().call_later(timeout_s, expire)

    def _abort(self, request: Generation) -> None:
        """Tell the router that nobody waits any more, and drop what still comes."""
        for slot in request.slots:
            active = self._active.get(slot)
            if active is not None and active.request is request:
                self._forget(slot)
                self._send(AbortRequest(slot, active.generation))
                self.metrics.aborted.inc()

    def close(self, request: Generation) -> None:
        """The consumer is done with a request, complete or not."""
        if request.deadline is not None:
            request.deadline.cancel()
        self._abort(request)
        for sequence, prompt in zip(request.sequences[:: request.spec.n], request.spec.prompts, strict=True):
            if sequence.cached_tokens is None:  # it was refused, or ended before its first token
                continue
            self.metrics.prompt_tokens.inc(len(prompt))
            for tier in CacheTier:
                self.metrics.cached_tokens.inc(sequence.cached_tokens[tier], tier.name.lower())

    def _forget(self, slot: int) -> None:
        del self._active[slot]
        self._pool.let_go(slot)

    def _send(self, message: Message) -> None:
        """A message about a request that has ended here; the router's own deadline covers one that is lost."""
        if self._router is None:
            return
        try:
            self._router.send(message)
        except ChannelFullError:
            logger.warning("the router does not read; dropped a %s", type(message).__name__)

    # --- outputs ----------------------------------------------------------------------------------------------------

    def handle(self, messages: Iterable[Message]) -> None:
        """Handle what came from the router."""
        for message in messages:
            if isinstance(message, OutputBatch):
                self._handle_batch(message)
            elif isinstance(message, SlotReleased):
                self._pool.released(message.slots)
            else:
                logger.warning("dropped an unexpected %s", type(message).__name__)

    def _handle_batch(self, batch: OutputBatch) -> None:
        now = time.monotonic()
        for output in batch.outputs:
            active = self._active.get(output.slot)
            if active is None or active.generation != output.generation:
                continue  # ended here already
            self._observe(active, output, now)
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._fail(output, active)
            else:
                self._advance(output, active)
        self.metrics.output_seconds.inc(time.monotonic() - now)

    def _advance(self, output: RequestOutput, active: _Active) -> None:
        sequence = active.sequence
        try:
            delta = sequence.advance(output)
        except Exception:  # of one request's text: the streams of all others go on
            logger.exception("request %s: its tokens cannot be made into text", active.request.spec.request_id)
            active.request.fail(ApiError(500, "the output cannot be made into text"))
            self._abort(active.request)
            return
        if sequence.ended_here:
            self._send(FinishRequest(output.slot, output.generation, sequence.num_tokens))
        if sequence.ending is not None:
            self._forget(output.slot)
        if delta is not None:
            active.request.push(delta)

    def _fail(self, output: RequestOutput, active: _Active) -> None:
        """One failed sequence ends its whole request."""
        self._forget(output.slot)
        is_error = output.finish_reason is FinishReason.ERROR
        active.request.fail(failure_of(output.error, output.error_code if is_error else 503))
        self._abort(active.request)

    def _observe(self, active: _Active, output: RequestOutput, now: float) -> None:
        if not output.token_ids:
            return
        elapsed, active.last_output_at = now - active.last_output_at, now
        is_first = active.sequence.num_tokens == 0
        (self.metrics.first_token if is_first else self.metrics.next_token).observe(elapsed)
        self.metrics.generated_tokens.inc(len(output.token_ids))
