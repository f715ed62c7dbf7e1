"""Requests that wait to be admitted, in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from serve.router.request import Request


class WaitingQueue:
    """Waiting requests by priority, then arrival. A preempted request comes back to its old place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=lambda r: r.sort_key)

    def discard(self, request: Request) -> bool:
        """Take a request out; False when it is not here."""
        place = bisect_left(self._requests, request.sort_key, key=lambda r: r.sort_key)
        if place < len(self._requests) and self._requests[place] is request:
            del self._requests[place]
            return True
        return False
