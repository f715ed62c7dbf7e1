import pytest

from models import weights_digest
from models.weights_digest import digest_block, file_blocks, merge_block_digests


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_digest, "BLOCK_BYTES", 1000)
    for name, size in (("a", 2500), ("b", 1000), ("c", 1)):
        (tmp_path / name).write_bytes(bytes(i * 7 % 251 for i in range(size)))
    return tuple(tmp_path / name for name in "abc")


def digest(files, size):
    blocks = file_blocks(files)
    parts = [{i: digest_block(*blocks[i]) for i in range(rank, len(blocks), size)} for rank in range(size)]
    return merge_block_digests({index: value for part in parts for index, value in part.items()}, len(blocks))


def test_blocks_cover_the_files(files):
    assert [(path.name, start, length) for path, start, length in file_blocks(files)] == [
        ("a", 0, 1000),
        ("a", 1000, 1000),
        ("a", 2000, 500),
        ("b", 0, 1000),
        ("c", 0, 1),
    ]


def test_the_digest_does_not_depend_on_who_hashed_what(files):
    assert len({digest(files, size) for size in (1, 2, 3, 8)}) == 1
    assert len(digest(files, 1)) == 32


def test_a_changed_byte_changes_the_digest(files):
    before = digest(files, 2)
    content = bytearray(files[0].read_bytes())
    content[1999] ^= 1
    files[0].write_bytes(content)
    assert digest(files, 2) != before


def test_a_missing_block_or_one_too_many_is_refused():
    with pytest.raises(ValueError, match="1 of 3 block digests are missing, the first is 1"):
        merge_block_digests({0: b"", 2: b""}, 3)
    with pytest.raises(ValueError, match="2 block digests were given for 1"):
        merge_block_digests({0: b"", 1: b""}, 1)


def test_a_file_that_became_shorter_is_an_error(files):
    block = file_blocks(files)[2]
    files[0].write_bytes(b"short")
    with pytest.raises(OSError, match="became shorter"):
        digest_block(*block)
