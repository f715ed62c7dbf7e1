"""Digest of the weights' content: blocks that ranks hash apart, merged by the launcher. Free of torch."""

import hashlib
import os
from pathlib import Path

DIGEST_BYTES = 32
BLOCK_BYTES = 8 << 20


def file_blocks(files: tuple[Path, ...]) -> list[tuple[Path, int, int]]:
    """(file, offset, length) of every block, file by file; a file's last block may be short."""
    blocks = []
    for file in files:
        size = file.stat().st_size
        blocks += [(file, start, min(BLOCK_BYTES, size - start)) for start in range(0, size, BLOCK_BYTES)]
    return blocks


def digest_block(file: Path, offset: int, length: int) -> bytes:
    """BLAKE2b of one block. Raises OSError if the file cannot be read or became shorter."""
    with file.open("rb") as opened:
        data = os.pread(opened.fileno(), length, offset)
    if len(data) != length:
        raise OSError(f"{file} became shorter while it was read")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def merge_block_digests(digests: dict[int, bytes], num_blocks: int) -> bytes:
    """One 32-byte digest of all blocks, whoever hashed them. Raises ValueError if one is missing or there are more."""
    missing = [index for index in range(num_blocks) if index not in digests]
    if missing:
        raise ValueError(f"{len(missing)} of {num_blocks} block digests are missing, the first is {missing[0]}")
    if len(digests) != num_blocks:
        raise ValueError(f"{len(digests)} block digests were given for {num_blocks} blocks")
    merged = hashlib.blake2b(num_blocks.to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for index in range(num_blocks):
        merged.update(digests[index])
    return merged.digest()
