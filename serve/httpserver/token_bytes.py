"""The bytes that each token of a vocabulary stands for, as a table.

Detokenizing by table is exact for the two families that language models use: byte-level BPE (each character of a
piece is a byte) and SentencePiece (a mark for the space, `<0xNN>` for single bytes). Other decoders go token by token
through the library.
"""

import json
import re
from functools import lru_cache

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@lru_cache(maxsize=1)
def byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each of the 256 bytes (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, extra = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
            continue
        characters.append(chr(extra))
        extra += 1
    return characters


def token_bytes_table(tokenizer: Tokenizer) -> tuple[list[bytes], frozenset[int]]:
    """The bytes of every id [vocab_size], and the ids of special tokens."""
    added = tokenizer.get_added_tokens_decoder()
    pieces = {token_id: piece for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    steps = _decoder_steps(tokenizer)
    table = [b""] * (max(pieces, default=-1) + 1)
    convert = _converter(tokenizer, steps)
    for token_id, piece in pieces.items():
        table[token_id] = piece.encode() if token_id in added else convert(token_id, piece)
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    return table, special


def _decoder_steps(tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    if tokenizer.decoder is None:
        return {}
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"]: step for step in steps}


class _ByteLevel:
    """Each character is a byte; a piece with any other character is text as it stands, as the library has it."""

    def __init__(self) -> None:
        self._bytes = {character: byte for byte, character in enumerate(byte_characters())}

    def __call__(self, token_id: int, piece: str) -> bytes:
        try:
            return bytes([self._bytes[character] for character in piece])
        except KeyError:
            return piece.encode()


class _SentencePiece:
    """`mark` is a space; `<0xNN>` is a byte where the decoder falls back to bytes."""

    def __init__(self, mark: str, byte_fallback: bool) -> None:
        self._mark = mark
        self._byte_fallback = byte_fallback

    def __call__(self, token_id: int, piece: str) -> bytes:
        found = _BYTE_PIECE.match(piece) if self._byte_fallback else None
        return bytes([int(found[1], 16)]) if found else piece.replace(self._mark, " ").encode()


class _TokenByToken:
    """What the library's own decoder gives for the token alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int, piece: str) -> bytes:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _converter(
    tokenizer: Tokenizer, steps: dict[str, dict[str, object]]
) -> _ByteLevel | _SentencePiece | _TokenByToken:
    if "ByteLevel" in steps:
        return _ByteLevel()
    if "Metaspace" in steps:
        return _SentencePiece(str(steps["Metaspace"]["replacement"]), "ByteFallback" in steps)
    if "ByteFallback" in steps:
        pattern = steps.get("Replace", {}).get("pattern", {})
        mark = pattern.get("String", "▁") if isinstance(pattern, dict) else "▁"
        return _SentencePiece(mark, True)
    return _TokenByToken(tokenizer)
