"""Hashes a rank's share of the weight files while the weights are being loaded."""

from concurrent.futures import Executor, Future
from pathlib import Path

from models.errors import ModelError
from models.weights_digest import digest_block, file_blocks


class BlockDigester:
    """Digests blocks rank, rank + size, rank + 2 size, ... of `files` in the threads of `executor`."""

    def __init__(self, files: tuple[Path, ...], rank: int, size: int, executor: Executor) -> None:
        blocks = file_blocks(files)
        self.num_blocks = len(blocks)
        self._futures: dict[int, Future[bytes]] = {
            index: executor.submit(digest_block, *blocks[index]) for index in range(rank, len(blocks), size)
        }

    def result(self) -> dict[int, bytes]:
        """Digest by block index; waits for it. ModelError if a file cannot be read."""
        try:
            return {index: future.result() for index, future in self._futures.items()}
        except OSError as error:
            raise ModelError(f"weights cannot be read: {error}") from None
