"""One object in host slots, and the three axes of its state: content, pins, durability.

The axes are independent fields with a table of allowed moves each, and one mutator that raises on any other move.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from serve.types import Durability, JobId, PageContent

CONTENT_MOVES: dict[PageContent, frozenset[PageContent]] = {
    PageContent.EMPTY: frozenset({PageContent.FILLING}),
    PageContent.FILLING: frozenset({PageContent.READY, PageContent.EMPTY}),
    PageContent.READY: frozenset({PageContent.EMPTY}),
}

DURABILITY_MOVES: dict[Durability, frozenset[Durability]] = {
    Durability.VOLATILE: frozenset({Durability.PERSISTING, Durability.DURABLE}),  # DURABLE: promoted from a lower tier
    Durability.PERSISTING: frozenset({Durability.DURABLE, Durability.VOLATILE}),
    Durability.DURABLE: frozenset({Durability.VOLATILE}),
}


class IllegalMoveError(Exception):
    """A transition that its table does not have: a bug, never a user's fault."""


class DropReason(Enum):
    """Why a page left its slots, or never came into them."""

    EVICTED = "evicted"
    CLAIM_EXPIRED = "claim_expired"
    CLAIM_RELEASED = "claim_released"
    STORE_FAILED = "store_failed"
    PROMOTION_FAILED = "promotion_failed"
    CHECKSUM = "checksum"
    FLUSHED = "flushed"
    ENGINE_DOWN = "engine_down"
    OVERRUN = "overrun"  # a job that had lost its claim may have written into the slots


class Withheld(Enum):
    """Why a READY page was not offered to a secondary tier."""

    NO_HIT = "no_hit"  # only the request that stored it has wanted it so far
    SHORT_PROMPT = "short_prompt"


class PageUser(NamedTuple):
    """A request that wants a page: its slot in the request table, and the tokens of its prompt."""

    slot: int
    generation: int
    prompt_tokens: int


class PageUse:
    """Who has wanted a page since the host has it.

    prompt_tokens: of the longest prompt that has the page, 0 while none is known. is_hit: another request than the one
    that stored it found it here. withheld: why it was not offered to a secondary tier when that was last asked.
    """

    __slots__ = ("_stored_by", "is_hit", "prompt_tokens", "withheld")

    def __init__(self, stored_by: PageUser | None = None) -> None:
        self._stored_by = stored_by[:2] if stored_by is not None else None
        self.prompt_tokens = stored_by.prompt_tokens if stored_by is not None else 0
        self.is_hit = False
        self.withheld: Withheld | None = None

    def note(self, user: PageUser) -> None:
        """A request has found the page. The request that stored it meets it again when it claims the rest."""
        self.prompt_tokens = max(self.prompt_tokens, user.prompt_tokens)
        self.is_hit |= self._stored_by != user[:2]


class PageKey(NamedTuple):
    """Names an object: the page's 32-byte name and the state group."""

    name: bytes
    group: str


@dataclass(frozen=True)
class TierTicket:
    """A transfer between the host and a secondary tier; holds pins like a job does."""

    tier: str
    number: int


Holder = JobId | TierTicket


class PageObject:
    """An object and the slots it lies in. Only the page directory calls the mutators.

    doomed: set when the page is to be EMPTY as soon as its last pin, or its filling, has ended; until then readers and
    claimers no longer find it. use: what persistence goes by; the persister is its only writer.
    """

    __slots__ = ("content", "doomed", "durability", "generations", "key", "moved_at", "pins", "slots", "use")

    def __init__(self, key: PageKey, slots: tuple[int, ...], generations: tuple[int, ...], now: float) -> None:
        self.key = key
        self.slots = slots
        self.generations = generations
        self.content = PageContent.EMPTY
        self.durability = Durability.VOLATILE
        self.pins: set[Holder] = set()
        self.doomed: DropReason | None = None
        self.use = PageUse()
        self.moved_at = now

    def move_content(self, to: PageContent, now: float) -> None:
        """The only way to change `content`. Bytes that somebody holds never become EMPTY."""
        if to not in CONTENT_MOVES[self.content]:
            raise IllegalMoveError(f"content {self.content.value} -> {to.value}")
        if to is PageContent.EMPTY and self.pins:
            raise IllegalMoveError(f"content {self.content.value} -> empty with {len(self.pins)} pins")
        self.content = to
        self.moved_at = now

    def move_durability(self, to: Durability, now: float) -> None:
        """The only way to change `durability`; only READY pages have any but VOLATILE."""
        if to not in DURABILITY_MOVES[self.durability]:
            raise IllegalMoveError(f"durability {self.durability.value} -> {to.value}")
        if self.content is not PageContent.READY:
            raise IllegalMoveError(f"durability {to.value} of a page that is {self.content.value}")
        self.durability = to
        self.moved_at = now

    def pin(self, holder: Holder) -> None:
        """Keep the bytes until `unpin` by the same holder."""
        if self.content is not PageContent.READY or self.doomed is not None or holder in self.pins:
            raise IllegalMoveError(
                f"pin of a page that is {self.content.value}, doomed {self.doomed}, held {self.pins}"
            )
        self.pins.add(holder)

    def unpin(self, holder: Holder) -> None:
        """End one holder's pin."""
        if holder not in self.pins:
            raise IllegalMoveError(f"unpin by {holder}, which holds no pin")
        self.pins.discard(holder)
