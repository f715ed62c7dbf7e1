"""Which pages are worth a place in a secondary tier."""

from dataclasses import dataclass
from enum import Enum

from serve.multi_level_cache.page_state import PageUse, Withheld


class PersistPolicy(Enum):
    """When a page goes down: as soon as it is READY, or once another request has wanted it too."""

    WRITE_THROUGH = "write_through"
    AFTER_HITS = "after_hits"


@dataclass(frozen=True)
class PersistRules:
    """min_tokens: pages that were seen in prompts of fewer tokens only stay out; 0: none do."""

    policy: PersistPolicy = PersistPolicy.WRITE_THROUGH
    min_tokens: int = 0

    @property
    def waits_for_hits(self) -> bool:
        """Pages go down some time after they became READY."""
        return self.policy is PersistPolicy.AFTER_HITS

    def verdict(self, use: PageUse) -> Withheld | None:
        """What keeps a page of this use out of the tier; None: nothing does."""
        if use.prompt_tokens < self.min_tokens:
            return Withheld.SHORT_PROMPT
        if self.waits_for_hits and not use.is_hit:
            return Withheld.NO_HIT
        return None


PERSIST_ALL = PersistRules()
