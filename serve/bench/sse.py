"""Server-sent events of a streamed completion, read after the response has ended."""

from collections.abc import Iterable, Iterator

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Cached tokens, and where the server says it: from which tier."""

    cached_tokens: int | None = None
    cached_tokens_by_tier: dict[str, int] | None = None


class Usage(msgspec.Struct):
    """Token counts; every field may be missing at some server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    cached_tokens_by_tier: dict[str, int] | None = None


class Delta(msgspec.Struct):
    """What a chat event adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """The one choice of an event: `text` of completions, `delta` of chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class StreamEvent(msgspec.Struct):
    """One event of `/v1/completions` or `/v1/chat/completions`."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


DONE = b"[DONE]"
_decoder = msgspec.json.Decoder(StreamEvent)


def split_events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(time, payload) of every `data:` line; its time is that of the piece in which the line ended."""
    rest = b""
    for when, piece in reads:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()
    if rest.startswith(b"data:"):
        yield when, rest[5:].strip()


def decode_event(payload: bytes) -> StreamEvent:
    """The event of a payload; raises msgspec.MsgspecError when it is not one."""
    return _decoder.decode(payload)
