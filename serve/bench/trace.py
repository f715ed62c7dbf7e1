"""Request traces: one JSON object a line, in the format of the Mooncake traces or with the prompts themselves."""

from pathlib import Path

import msgspec

from serve.bench.flags import BenchError


class TraceEntry(msgspec.Struct, frozen=True):
    """One request of a trace.

    timestamp: in the trace's unit. prompt: text or token ids; without it, `input_length` tokens are made up, where
    hash_ids[i] stands for the content of block i. output_length: 0 takes the option's.
    """

    timestamp: float = 0.0
    prompt: str | list[int] | None = None
    input_length: int = 0
    hash_ids: list[int] = []
    output_length: int = 0


def read_trace(path: Path, limit: int | None) -> list[TraceEntry]:
    """The first `limit` entries by time; BenchError names the first line that is wrong."""
    decoder = msgspec.json.Decoder(TraceEntry)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(f"--trace {path}: {error.strerror}") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise BenchError(f"--trace {path} line {number}: {error}") from error
        if entry.prompt is None and entry.input_length < 1:
            raise BenchError(f"--trace {path} line {number}: neither prompt nor input_length")
        entries.append(entry)
    if not entries:
        raise BenchError(f"--trace {path}: empty")
    return sorted(entries, key=lambda entry: entry.timestamp)[:limit]
