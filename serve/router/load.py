"""One load: a waiting request's pages on their way from the host, or the disk, into the device."""

from dataclasses import dataclass, field
from enum import Enum

from serve.ipc.messages import AcquireReply
from serve.router.load_plan import LoadPlan
from serve.router.request import Request
from serve.types import CacheTier, JobId


class LoadPhase(Enum):
    """ACQUIRING: the manager pins and promotes. COPYING: the ranks copy. LOADED: the request may join the batch."""

    ACQUIRING = "acquiring"
    COPYING = "copying"
    LOADED = "loaded"


@dataclass(slots=True, eq=False)
class Load:
    """A job for each group that has pages to load.

    fresh: by group, places of the prefix that are loaded. num_loaded: places that need not be computed thanks to that,
    num_promoted: those thanks to the disk. waiting: jobs without their reply, then without their end. begun: jobs that
    the ranks have. deadline: when waiting for that ends. predicted_s: of the whole load, from its start on.
    """

    request: Request
    plan: LoadPlan
    fresh: dict[str, list[int]]
    num_loaded: int
    num_bytes: int
    predicted_s: float
    asked_at: float
    deadline: float
    begun_at: float = 0.0
    phase: LoadPhase = LoadPhase.ACQUIRING
    jobs: dict[JobId, str] = field(default_factory=dict)
    grants: dict[JobId, AcquireReply] = field(default_factory=dict)
    waiting: set[JobId] = field(default_factory=set)
    begun: set[JobId] = field(default_factory=set)
    num_promoted: int = 0

    @property
    def names(self) -> list[bytes]:
        """Names of the pages that it brings."""
        return [self.request.names[place] for place in sorted(set().union(*self.fresh.values()))]

    def cached_tokens(self, page_size: int) -> list[int]:
        """Tokens by tier that the request does not compute."""
        num_loaded, num_disk = self.num_loaded, min(self.num_loaded, self.num_promoted)
        pages = {
            CacheTier.DEVICE: self.plan.num_pages - num_loaded,
            CacheTier.HOST: num_loaded - num_disk,
            CacheTier.DISK: num_disk,
        }
        return [pages[tier] * page_size for tier in CacheTier]
