"""Hashes a rank's share of the weight files while the weights are being loaded."""

from concurrent.futures import Executor, Future
from pathlib import Path

from models.errors import ModelError
from models.source import Progress
from models.weights_digest import digest_block, file_blocks


class BlockDigester:
    """Digests blocks rank, rank + size, rank + 2 size, ... of `files` in the threads of `executor`."""

    def __init__(self, files: tuple[Path, ...], rank: int, size: int, executor: Executor) -> None:
        blocks = file_blocks(files)
        self._mine = {index: blocks[index] for index in range(rank, len(blocks), size)}
        self._futures: dict[int, Future[bytes]] = {
            index: executor.submit(digest_block, *block) for index, block in self._mine.items()
        }

    def result(self, progress: Progress | None = None) -> dict[int, bytes]:
        """Digest by block index; waits, and reports bytes as ("digest", done, total). ModelError if a file fails."""
        total, done, digests = sum(length for _, _, length in self._mine.values()), 0, {}
        try:
            for index, future in self._futures.items():
                digests[index] = future.result()
                done += self._mine[index][2]
                if progress is not None:
                    progress("digest", done, total)
        except OSError as error:
            raise ModelError(f"weights cannot be read: {error}") from error
        return digests
