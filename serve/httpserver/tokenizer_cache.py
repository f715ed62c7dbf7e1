"""Keeps the tokenizer that was made from a GGUF file, so that the next start only reads it.

An entry is named by the file's size, modification time and a digest of its beginning; it is written to a
temporary name and renamed. A directory that cannot be written costs only the time to build again.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from serve.httpserver.gguf_metadata import read_gguf_metadata
from serve.httpserver.gguf_tokenizer import GGUFVocabulary, build_tokenizer

logger = logging.getLogger(__name__)
FORMAT_VERSION = 1
SAMPLE_BYTES = 1 << 20


class GGUFTokenizerEntry(msgspec.Struct):
    """What serving needs of a GGUF file's tokenizer; `tokenizer_json` is in the tokenizers library's format."""

    tokenizer_json: str
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None


def load_gguf_entry(path: Path, cache_dir: Path) -> GGUFTokenizerEntry:
    """The tokenizer of a GGUF file, from the cache where it is there. Raises GGUFError, OSError."""
    cached = cache_dir / f"{_entry_name(path)}.msgpack"
    try:
        return msgspec.msgpack.decode(cached.read_bytes(), type=GGUFTokenizerEntry)
    except (OSError, msgspec.DecodeError):
        entry = convert_gguf(path)
    _write_atomically(cached, msgspec.msgpack.encode(entry))
    return entry


def convert_gguf(path: Path) -> GGUFTokenizerEntry:
    """Read a GGUF file's metadata and build its tokenizer."""
    metadata = read_gguf_metadata(path)
    vocabulary = GGUFVocabulary(metadata)
    ends = [vocabulary.special_id(name) for name in ("eos", "eot", "eom")]
    return GGUFTokenizerEntry(
        tokenizer_json=build_tokenizer(metadata).to_str(),
        bos_token=vocabulary.special("bos"),
        eos_token=vocabulary.special("eos"),
        eos_token_ids=sorted({end for end in ends if end is not None}),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _entry_name(path: Path) -> str:
    """Digest of what tells one file from another without reading all of it: size, time, and the first bytes."""
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
    identity = f"{FORMAT_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode()
    return hashlib.blake2b(head, digest_size=16, key=hashlib.blake2b(identity).digest()).hexdigest()


def _write_atomically(target: Path, data: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".tokenizer-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, target)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.info("the converted tokenizer is not kept: %s", error)
