"""What is sent: conversations of one turn or more, repeatable by seed, with fresh prompts for every repeat.

Every prompt draws from its own stream, seeded with (seed, repeat, purpose, index): no prompt depends on how many others
there are, and no two share more than chance lets them, unless the workload shares a prefix on purpose.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from serve.bench.arrivals import Arrival, arrival_offsets
from serve.bench.lengths import LengthRange
from serve.bench.options import ServeBenchOptions, WorkloadKind
from serve.bench.prompts import Prompt, PromptMaker
from serve.bench.trace import TraceEntry, read_trace


@dataclass(frozen=True)
class Turn:
    """One question: appended to the history of its conversation, answered with `output_len` tokens."""

    prompt: Prompt
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Conversation:
    """Turns that follow each other. offset: seconds after the start of the pass at which the first is due."""

    turns: tuple[Turn, ...]
    offset: float


class Stream(IntEnum):
    """What a random stream is for."""

    PROMPT = 0
    PREFIX = 1
    ARRIVAL = 2
    WARMUP = 3


def random_stream(seed: int, repeat: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """The generator of one purpose."""
    return np.random.default_rng([seed, repeat, int(stream), index])


def build_workload(options: ServeBenchOptions, maker: PromptMaker, seed: int, repeat: int) -> list[Conversation]:
    """All conversations of one repeat, by time of arrival."""
    if options.workload is WorkloadKind.TRACE:
        return _from_trace(options, maker, seed, repeat)
    builder = {
        WorkloadKind.RANDOM: _random_turns,
        WorkloadKind.SHARED_PREFIX: _shared_prefix_turns,
        WorkloadKind.MULTI_TURN: _conversation_turns,
    }[options.workload]
    offsets = _offsets(options, options.num_requests or 1, seed, repeat)
    return [Conversation(builder(options, maker, seed, repeat, i), offset) for i, offset in enumerate(offsets)]


def build_warmup(options: ServeBenchOptions, maker: PromptMaker, like: Turn, seed: int) -> list[Conversation]:
    """Short requests of the shape of `like`, with prompts that nothing else has."""
    output = min(like.output_len, 16)
    prompts = [maker.make(like.input_len, random_stream(seed, 0, Stream.WARMUP, i)) for i in range(options.num_warmups)]
    return [Conversation((Turn(prompt, like.input_len, output),), 0.0) for prompt in prompts]


def _offsets(options: ServeBenchOptions, count: int, seed: int, repeat: int) -> list[float]:
    rng = random_stream(seed, repeat, Stream.ARRIVAL)
    return arrival_offsets(options.arrivals, count, options.rate or 1.0, rng)


def _turn(maker: PromptMaker, rng: np.random.Generator, length: LengthRange, output: LengthRange) -> Turn:
    input_len, output_len = length.draw(rng), output.draw(rng)
    return Turn(maker.make(input_len, rng), input_len, output_len)


def _random_turns(
    options: ServeBenchOptions, maker: PromptMaker, seed: int, repeat: int, index: int
) -> tuple[Turn, ...]:
    rng = random_stream(seed, repeat, Stream.PROMPT, index)
    return (_turn(maker, rng, options.input_len, options.output_len),)


def _shared_prefix_turns(
    options: ServeBenchOptions, maker: PromptMaker, seed: int, repeat: int, index: int
) -> tuple[Turn, ...]:
    which = index % options.num_prefixes
    prefix = maker.make(options.prefix_len, random_stream(seed, repeat, Stream.PREFIX, which))
    (suffix,) = _random_turns(options, maker, seed, repeat, index)
    prompt = maker.join([prefix, suffix.prompt])
    return (Turn(prompt, options.prefix_len + suffix.input_len, suffix.output_len),)


def _conversation_turns(
    options: ServeBenchOptions, maker: PromptMaker, seed: int, repeat: int, index: int
) -> tuple[Turn, ...]:
    rng = random_stream(seed, repeat, Stream.PROMPT, index)
    lengths = [options.input_len] + [options.turn_input_len] * (options.num_turns - 1)
    return tuple(_turn(maker, rng, length, options.output_len) for length in lengths)


def _from_trace(options: ServeBenchOptions, maker: PromptMaker, seed: int, repeat: int) -> list[Conversation]:
    """One conversation of one turn an entry; equal hash ids become equal blocks of tokens."""
    if options.trace is None:
        raise ValueError("no trace")
    entries = read_trace(options.trace, options.num_requests)
    scale = options.trace_time_unit / options.trace_speed
    if options.arrivals is Arrival.TRACE:
        offsets = [(entry.timestamp - entries[0].timestamp) * scale for entry in entries]
    else:
        offsets = _offsets(options, len(entries), seed, repeat)
    return [
        Conversation((_trace_turn(options, maker, entry, seed, repeat, index),), offset)
        for index, (entry, offset) in enumerate(zip(entries, offsets, strict=True))
    ]


def _trace_turn(
    options: ServeBenchOptions, maker: PromptMaker, entry: TraceEntry, seed: int, repeat: int, index: int
) -> Turn:
    output = entry.output_length or options.output_len.low
    if entry.prompt is not None:
        return Turn(entry.prompt, entry.input_length, output)
    length, parts = entry.input_length, list[Prompt]()
    for hash_id in entry.hash_ids[: -(-length // options.trace_block)]:
        block = min(options.trace_block, length)
        parts.append(maker.make(block, random_stream(seed, repeat, Stream.PREFIX, hash_id)))
        length -= block
    if length:
        parts.append(maker.make(length, random_stream(seed, repeat, Stream.PROMPT, index)))
    return Turn(maker.join(parts), entry.input_length, output)
