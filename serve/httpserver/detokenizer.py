"""Incremental detokenizing that never cuts a character in two."""

import codecs
from collections.abc import Iterable, Sequence

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence's tokens as they come.

    The bytes of tokens are joined before they are decoded, and an incomplete character waits for its rest, so that text
    does not depend on how tokens are grouped into calls. Bytes that can never become a character give U+FFFD; an
    incomplete character at the end of the sequence is dropped, in streams and non-streams alike.

    token_bytes: bytes of each id. skipped: ids that give no text (special tokens).
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decode = _utf8_decoder(errors="replace").decode

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that became complete with these tokens. An id beyond the vocabulary gives none."""
        table, skipped = self._token_bytes, self._skipped
        size = len(table)
        parts = [table[token_id] for token_id in token_ids if token_id < size and token_id not in skipped]
        return self._decode(b"".join(parts))
