"""What the cache manager said it has of a request, as sets of page numbers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serve.ipc.messages import PageRange, ProbeReply


@dataclass(slots=True)
class Found:
    """By group, a number whose bit i says that page i is there. It may have gone since."""

    host: dict[str, int]
    disk: dict[str, int]

    @classmethod
    def of(cls, reply: ProbeReply) -> "Found":
        """From the bitmaps of a reply, whose bit order is that of a little-endian number."""
        host = {group: int.from_bytes(bits, "little") for group, bits in reply.host.items()}
        disk = {group: int.from_bytes(bits, "little") for group, bits in reply.disk.items()}
        return cls(host, disk)

    @property
    def is_empty(self) -> bool:
        """Nothing is there."""
        return not any(self.host.values()) and not any(self.disk.values())

    def anywhere(self, group: str) -> int:
        """Pages of a group that the host or the disk has."""
        return self.host.get(group, 0) | self.disk.get(group, 0)

    def lose(self, ranges: Iterable[PageRange]) -> None:
        """These turned out to be missing."""
        for pages in ranges:
            gone = mask_of(pages.first, pages.count)
            for tier in (self.host, self.disk):
                if pages.group in tier:
                    tier[pages.group] &= ~gone


def mask_of(first: int, count: int) -> int:
    """The set [first, first + count)."""
    return ((1 << count) - 1) << first


def members(mask: int) -> Iterator[int]:
    """Numbers in the set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def ranges_of(group: str, numbers: Iterable[int]) -> list[PageRange]:
    """The fewest ranges that name these ascending page numbers."""
    ranges: list[PageRange] = []
    for number in numbers:
        if ranges and ranges[-1].first + ranges[-1].count == number:
            ranges[-1] = PageRange(group, ranges[-1].first, ranges[-1].count + 1)
        else:
            ranges.append(PageRange(group, number, 1))
    return ranges
