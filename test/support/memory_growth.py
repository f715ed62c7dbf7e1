"""How memory grows with requests, told apart from what allocators do once in a while."""

import statistics
from collections.abc import Sequence
from itertools import pairwise


def bytes_a_request(samples: Sequence[tuple[int, int]]) -> float:
    """Growth of (requests so far, bytes): the median of what lies between one sample and the next.

    A leak shows between any two samples that are far enough apart for an allocator's steps (256 KiB in CPython). A heap
    that is enlarged, an arena that a new thread takes, or memory that is given back shows between two of them only.
    """
    growths = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairwise(samples)]
    return statistics.median(growths)
