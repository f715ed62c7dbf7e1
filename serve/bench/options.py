"""What `varve bench serve` can be told."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serve.bench.arrivals import Arrival
from serve.bench.lengths import Length, LengthRange


class WorkloadKind(Enum):
    """What is sent."""

    RANDOM = "random"
    SHARED_PREFIX = "shared_prefix"
    MULTI_TURN = "multi_turn"
    TRACE = "trace"


class PromptFormat(Enum):
    """How a prompt travels. AUTO: token ids where the endpoint and the workload allow it, else text."""

    AUTO = "auto"
    TOKEN_IDS = "token_ids"
    TEXT = "text"


class Endpoint(Enum):
    """Which OpenAI route is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """The route below the base URL."""
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


def _parse_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


JsonObject = Annotated[dict[str, object], BeforeValidator(_parse_object)]


class ServeBenchOptions(BaseModel):
    """All options of one run; the flags are generated from the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    base_url: str = Field("http://127.0.0.1:8000", description="server to load, with or without /v1")
    model: str | None = Field(None, description="model name to ask for; default: the first of /v1/models")
    api_key: str | None = Field(None, description="sent as a bearer token")
    endpoint: Endpoint = Field(Endpoint.COMPLETIONS, description="completions or chat")
    ignore_eos: bool = Field(True, description="ask for exactly the output length; false for servers that refuse it")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    extra_body: JsonObject = Field({}, description="JSON object merged into every request body")
    timeout: float = Field(600.0, gt=0, description="seconds until a request counts as failed")

    workload: WorkloadKind = Field(WorkloadKind.RANDOM, description="random, shared_prefix, multi_turn or trace")
    num_requests: int | None = Field(
        None, ge=1, description="requests, or conversations; default: 1, or the whole trace"
    )
    input_len: Length = Field(LengthRange(512, 512), description="prompt tokens (suffix, first turn): N or LOW:HIGH")
    output_len: Length = Field(LengthRange(128, 128), description="tokens to generate: N or LOW:HIGH")
    num_prefixes: int = Field(1, ge=1, description="shared_prefix: distinct prefixes")
    prefix_len: int = Field(1024, ge=1, description="shared_prefix: tokens a prefix")
    num_turns: int = Field(4, ge=1, description="multi_turn: turns a conversation")
    turn_input_len: Length = Field(LengthRange(64, 64), description="multi_turn: tokens of each later question")
    trace: Path | None = Field(None, description="trace: JSONL with timestamp, prompt or input_length and hash_ids")
    trace_time_unit: float = Field(0.001, gt=0, description="trace: seconds a unit of timestamp")
    trace_speed: float = Field(1.0, gt=0, description="trace: play so many times faster")
    trace_block: int = Field(512, ge=1, description="trace: tokens that one hash id stands for")
    passes: int = Field(1, ge=1, description="send the same prompts so many times, one pass after another")
    pass_pause: float = Field(0.0, ge=0, description="seconds between passes")

    arrival: Arrival | None = Field(
        None, description="all_at_once, fixed, poisson, closed_loop or trace; default: all_at_once, or as in the trace"
    )
    rate: float | None = Field(None, gt=0, description="fixed, poisson: conversations a second")
    concurrency: int | None = Field(None, ge=1, description="conversations in flight at most")

    prompt_format: PromptFormat = Field(PromptFormat.AUTO, description="auto, token_ids or text")
    vocab_size: int = Field(32000, ge=16, description="token ids are drawn below this")
    tokenizer: Path | None = Field(None, description="tokenizer.json, or its directory: text of exact length")
    seed: int | None = Field(None, ge=0, description="makes prompts repeatable; default: new ones every run")
    num_warmups: int = Field(1, ge=0, description="uncounted requests before the first repeat")
    repeat: int = Field(1, ge=1, description="runs with fresh prompts; medians are reported")

    server_pid: int | None = Field(None, ge=1, description="local server: report CPU seconds of its processes by role")
    json_file: Path | None = Field(None, alias="json", description="write all figures to this file")
    plot: Path | None = Field(None, description="write a picture of latencies and throughput to this PNG file")
    progress: bool = Field(True, description="show a progress bar on a terminal")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Options that only make sense together."""
        if self.arrival in (Arrival.FIXED, Arrival.POISSON) and self.rate is None:
            raise ValueError(f"--arrival {self.arrival.value} needs --rate")
        if self.arrival is Arrival.CLOSED_LOOP and self.concurrency is None:
            raise ValueError("--arrival closed_loop needs --concurrency")
        if (self.workload is WorkloadKind.TRACE) != (self.trace is not None):
            raise ValueError("--workload trace and --trace FILE go together")
        if self.arrival is Arrival.TRACE and self.workload is not WorkloadKind.TRACE:
            raise ValueError("--arrival trace needs --workload trace")
        if self.prompt_format is PromptFormat.TOKEN_IDS and self._needs_text:
            raise ValueError("--prompt_format token_ids fits neither chat nor multi_turn, whose prompts hold answers")
        return self

    @property
    def arrivals(self) -> Arrival:
        """How arrivals are spread, with the workload's default filled in."""
        if self.arrival is None:
            return Arrival.TRACE if self.workload is WorkloadKind.TRACE else Arrival.ALL_AT_ONCE
        return self.arrival

    @property
    def _needs_text(self) -> bool:
        return self.endpoint is Endpoint.CHAT or self.workload is WorkloadKind.MULTI_TURN

    @property
    def uses_token_ids(self) -> bool:
        """Whether prompts are sent as token ids."""
        if self.prompt_format is PromptFormat.AUTO:
            return not self._needs_text
        return self.prompt_format is PromptFormat.TOKEN_IDS
