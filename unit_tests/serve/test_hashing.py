"""Names of pages: what they depend on, and that no two inputs share an encoding."""

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.hashing import DIGEST_BYTES, PageHasher, keyed_hash

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
FIELDS = st.lists(st.none() | st.binary(max_size=3), max_size=3)


def hasher(**changes: object) -> PageHasher:
    return PageHasher(**{"key": KEY, "namespace": b"namespace", "page_size": 4, **changes})  # type: ignore[arg-type]


def test_the_encoding_is_the_documented_one():
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=KEY, person=b"varve")
    state.update((5).to_bytes(8, "little") + b"label" + b"\0" + b"\1" + (2).to_bytes(8, "little") + b"ab")
    assert keyed_hash(KEY, "label", [None, b"ab"]) == state.digest()


@given(FIELDS, FIELDS)
@settings(max_examples=100, deadline=None)
def test_different_fields_have_different_names(first: list[bytes | None], second: list[bytes | None]):
    assert (keyed_hash(KEY, "x", first) == keyed_hash(KEY, "x", second)) == (first == second)


def test_a_root_depends_on_all_that_pages_must_not_share():
    roots = [
        hasher().root(None, None), hasher().root(None, b""), hasher().root(b"", None), hasher().root(None, b"salt"),
        hasher().root(b"salt", None), hasher().root(b"other", None), hasher().root(None, b"other"),
        hasher(key=OTHER_KEY).root(None, None), hasher(namespace=b"o").root(None, None),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_a_page_depends_on_its_parent_its_tokens_and_extra():
    tokens = np.arange(4)
    names = [
        hasher().page(b"parent", tokens), hasher().page(b"other", tokens), hasher().page(b"parent", tokens[::-1]),
        hasher().page(b"parent", tokens, b""), hasher().page(b"parent", tokens, b"extra"),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert hasher().page(b"parent", tokens.astype(np.int32)) == hasher().page(b"parent", tokens.astype(np.uint64))


def test_a_chain_names_full_pages_only_and_shares_prefixes():
    root = hasher().root(None, None)
    counts = [len(hasher().chain(root, np.arange(length))) for length in (0, 3, 4, 5, 7, 8)]
    assert counts == [0, 0, 1, 1, 1, 2]
    first, second = hasher().chain(root, np.arange(8)), hasher().chain(root, np.array([0, 1, 2, 3, 9, 9, 9, 9]))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[1] == hasher().page(first[0], np.arange(4, 8))
