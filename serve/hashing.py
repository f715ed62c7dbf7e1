"""Names of pages: keyed BLAKE2b over everything that a page's bytes depend on. The one hasher of the project.

`root = H("varve-root"; namespace, adapter digest, salt)` and `page = H("varve-page"; parent, token ids, extra)`. Every
field is length-prefixed and an absent field differs from an empty one, so no two field lists share an encoding.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_BYTES = 32


def keyed_hash(key: bytes, label: str, fields: Sequence[bytes | None]) -> bytes:
    """32-byte keyed BLAKE2b of a label and fields; each field is tagged absent or present and length-prefixed."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"varve")
    encoded = label.encode()
    state.update(len(encoded).to_bytes(8, "little"))
    state.update(encoded)
    for field in fields:
        if field is None:
            state.update(b"\0")
            continue
        state.update(b"\1" + len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


class PageHasher:
    """Names the pages of one namespace. `key`: 32 random bytes, the same in every process of a server."""

    def __init__(self, key: bytes, namespace: bytes, page_size: int) -> None:
        self._key = key
        self._namespace = namespace
        self.page_size = page_size

    def root(self, adapter_digest: bytes | None, salt: bytes | None) -> bytes:
        """The parent of a first page."""
        return keyed_hash(self._key, "varve-root", [self._namespace, adapter_digest, salt])

    def page(self, parent: bytes, token_ids: np.ndarray, extra: bytes | None = None) -> bytes:
        """The name of one full page: `token_ids` is [page_size], any integer dtype."""
        return keyed_hash(self._key, "varve-page", [parent, token_ids.astype("<u4").tobytes(), extra])

    def chain(self, root: bytes, token_ids: np.ndarray) -> list[bytes]:
        """Names of all full pages of a prompt [num_tokens], in order."""
        names, parent = [], root
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            parent = self.page(parent, token_ids[end - self.page_size : end])
            names.append(parent)
        return names
