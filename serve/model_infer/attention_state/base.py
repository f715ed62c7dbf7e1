"""The contract of a state manager: one state group on one rank."""

from abc import ABC, abstractmethod

import numpy as np
import torch

from models.state_layout import StateGroup

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class AttentionState(ABC):
    """Owns the device tensors of one state group; the only writer of their layout, never of which page is whose.

    The caller (the worker's one thread) guarantees: `allocate` once, before anything else; ids below the number
    allocated; for each plan the order restore, forward, advance, snapshot. Ids come from plans and are the same on
    every rank: a manager never allocates, matches or evicts.

    An implementation must: launch all its work on the current stream and return without waiting for it; touch no page
    but those named; leave a named page as it was when it raises.

    `full.py` holds groups that grow by token. A group of kind BOUNDED (`bounded.py`: sliding windows, recurrent and
    short-convolution state) keeps a running slot a row beside its pages, moves it with `advance`, and copies it to and
    from checkpoint pages in `snapshot` and `restore`. A group of kind TAIL (`tail.py`: compressor remainders) does the
    same with what lies between two boundaries; its objects are small and often empty.
    """

    def __init__(self, group: StateGroup, num_kv_heads: int, device: torch.device) -> None:
        """num_kv_heads: those of this rank."""
        self.group = group
        self.num_kv_heads = num_kv_heads
        self.device = device

    @property
    @abstractmethod
    def bytes_per_page(self) -> int:
        """Device bytes of one page on this rank."""

    @abstractmethod
    def allocate(self, num_pages: int) -> None:
        """Make the pool. Memory need not be touched before it is used."""

    @property
    @abstractmethod
    def pool(self) -> torch.Tensor:
        """The pool as `ForwardBatch.kv_pools` describes it; raises RuntimeError before `allocate`."""

    @property
    @abstractmethod
    def padded_pool(self) -> torch.Tensor:
        """The pool and one spare page behind it, on the same memory: rows that stand for no request write there."""

    @abstractmethod
    def advance(self, rows: np.ndarray, context_lens: np.ndarray) -> None:
        """A forward has moved rows int64 [B] to context_lens [B] tokens; update what is kept beside the pages."""

    @abstractmethod
    def snapshot(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Copy the running state of rows int64 [N], which stand on a boundary, into checkpoint pages int64 [N]."""

    @abstractmethod
    def restore(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Make checkpoint pages int64 [N] the running state of rows int64 [N]."""
