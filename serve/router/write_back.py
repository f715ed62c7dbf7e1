"""Write-back: full pages of the device go out to the host, beside everything else and never in its way."""

from collections.abc import Iterable
from dataclasses import dataclass

from serve.ipc.messages import Claim, ClaimReply, PageRange, Release, StorePages
from serve.router.cache_client import CacheClient
from serve.router.found import mask_of, members, ranges_of
from serve.router.jobs import JobBook
from serve.router.ledger import StateLedger
from serve.router.request import Request
from serve.router.step_plan import Pipeline
from serve.router.tier_statistics import Drop, TransferStatistics
from serve.types import JobId, JobResult

MAX_JOBS = 64
MAX_PUT_OFF = 256  # requests whose pages wait for others to be stored
MAX_SHARE = 0.25  # of a pool, in the hands of store jobs
_CLAIM_WAIT_S = 1.0
_LEASE_S = 4.0


@dataclass(frozen=True, slots=True)
class _Claimed:
    """Pages of one request and group on their way: asked for until `deadline`, then stored."""

    request: Request
    group: str
    numbers: tuple[int, ...]
    deadline: float

    @property
    def mask(self) -> int:
        return sum(1 << number for number in self.numbers)


class WriteBack:
    """Claims host slots for pages that the host lacks and sends the store jobs.

    What is claimed is named by page names; the device page is looked up when its slot has come, so that a claim holds
    nothing. What would be too much at once is put off until jobs have ended; what cannot be stored is counted and stays
    a candidate: at the request's end, and at the next hit.
    """

    def __init__(
        self,
        ledger: StateLedger,
        jobs: JobBook,
        cache: CacheClient,
        pipeline: Pipeline,
        page_bytes: dict[str, int],
        stores_output: bool,
        statistics: TransferStatistics,
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._cache = cache
        self._pipeline = pipeline
        self._page_bytes = page_bytes
        self._stores_output = stores_output
        self._statistics = statistics
        self._limits = {name: max(2, int(group.num_pages * MAX_SHARE)) for name, group in ledger.groups.items()}
        self._claims: dict[JobId, _Claimed] = {}  # in order of deadline
        self._stores: dict[JobId, _Claimed] = {}
        self._put_off: dict[tuple[Request, str], int] = {}

    def __len__(self) -> int:
        return len(self._claims) + len(self._stores)

    # --- what there is to store ---

    def admitted(self, request: Request, num_pages: int, loaded: dict[str, list[int]], now: float) -> None:
        """A request joins behind a prefix of `num_pages`, some of which were `loaded` by group."""
        for group in self._page_bytes:
            known = request.found.host.get(group, 0) if request.found is not None else 0
            known |= sum(1 << number for number in loaded.get(group, ()))
            request.stored[group] = request.stored.get(group, 0) | known
        request.found = None
        request.num_verified = max(request.num_verified, num_pages * self._ledger.page_size)
        self._offer(request, num_pages, now)

    def computed(self, request: Request, num_tokens: int, now: float) -> None:
        """The plan that computed its known tokens up to `num_tokens` has ended well."""
        request.num_verified = max(request.num_verified, num_tokens)
        self._offer(request, num_tokens // self._ledger.page_size, now)

    def ended(self, request: Request, now: float) -> None:
        """A request is over: try once more what is missing. The slot with its names may go, so the claim has them."""
        num_tokens = request.num_tokens if self._stores_output else request.num_prompt
        verified = max(request.num_verified, request.num_tokens - 1 if request.num_generated else 0)
        num_pages = min(num_tokens, verified) // self._ledger.page_size
        for group in self._page_bytes:
            self._claim_named(request, group, mask_of(0, num_pages) & ~request.stored.get(group, 0), now)

    def checkpointed(self, request: Request, place: int, now: float) -> None:
        """The last state of a request that is over is the checkpoint of that place now."""
        if not self._stores_output and (place + 1) * self._ledger.page_size > request.num_prompt:
            return
        for name, group in self._ledger.groups.items():
            if group.spec.has_checkpoints:
                self._claim_named(request, name, mask_of(place, 1) & ~request.stored.get(name, 0), now)

    def _offer(self, request: Request, num_pages: int, now: float) -> None:
        num_pages = min(num_pages, request.num_prompt // self._ledger.page_size)
        if num_pages <= request.num_offered:
            return
        new = mask_of(request.num_offered, num_pages - request.num_offered)
        request.num_offered = num_pages
        for group in self._page_bytes:
            numbers = self._storable(request, group, new & ~request.stored.get(group, 0))
            if numbers:
                ranges = ranges_of(group, numbers)
                self._send(request, group, numbers, self._message(request, ranges), now)

    def _claim_named(self, request: Request, group: str, mask: int, now: float) -> None:
        """All of the prefix that the device has is named, so that none of it is evicted for the rest."""
        numbers = self._storable(request, group, mask)
        if not numbers:
            return
        index, names, root = self._ledger.groups[group].index, request.names, request.root
        named = [number for number in range(numbers[-1] + 1) if names[number] in index]
        message = self._message(request, ranges_of(group, named))
        message.names, message.root = b"".join(names[number] for number in named), root
        message.parents = b"".join(names[pages.first - 1] if pages.first else root for pages in message.ranges)
        self._send(request, group, numbers, message, now)

    def _message(self, request: Request, ranges: list[PageRange]) -> Claim:
        key, job, num_ranks = request.key, self._jobs.new_id(), self._jobs.num_ranks
        return Claim(job, key.slot, key.generation, ranges, num_ranks, _LEASE_S, num_prompt=request.num_prompt)

    def _storable(self, request: Request, group: str, mask: int) -> list[int]:
        """Pages of the set that have a name and are on the device, as many as may be on their way."""
        if not mask or not self._page_bytes[group]:
            return []
        index, names = self._ledger.groups[group].index, request.names
        present = [number for number in members(mask) if number < len(names) and names[number] in index]
        room = self._room(group)
        if len(present) > room:
            self._wait(request, group, present[room:])
        return present[:room]

    def _room(self, group: str) -> int:
        """Pages that may be claimed now."""
        if len(self) >= MAX_JOBS:
            return 0
        claims = (*self._claims.values(), *self._stores.values())
        under_way = sum(len(claimed.numbers) for claimed in claims if claimed.group == group)
        return max(0, self._limits[group] - under_way)

    def _wait(self, request: Request, group: str, numbers: list[int]) -> None:
        key = request, group
        if key not in self._put_off and len(self._put_off) >= MAX_PUT_OFF:
            self._drop(Drop.BUSY, len(numbers))
            return
        self._put_off[key] = self._put_off.get(key, 0) | sum(1 << number for number in numbers)

    def resume(self, now: float) -> None:
        """Claim what was put off, oldest first, as far as there is room for it by now."""
        while self._put_off:
            request, group = key = next(iter(self._put_off))
            if not self._room(group):
                return
            mask = self._put_off.pop(key) & ~request.stored.get(group, 0)
            index = self._ledger.groups[group].index
            self._drop(Drop.EVICTED, sum(request.names[number] not in index for number in members(mask)))
            self._claim_named(request, group, mask, now)

    def _send(self, request: Request, group: str, numbers: list[int], message: Claim, now: float) -> None:
        if self._cache.request(message, now):
            self._claims[message.job] = _Claimed(request, group, tuple(numbers), now + _CLAIM_WAIT_S)
        else:
            self._drop(Drop.AWAY, len(numbers))

    def _drop(self, reason: Drop, num_pages: int) -> None:
        if num_pages > 0:
            self._statistics.num_dropped[reason] += num_pages

    # --- claims ---

    def take_reply(self, reply: ClaimReply, now: float) -> None:
        """Slots have come, or not. Slots that nobody waits for any more are given back."""
        self._cache.heard()
        claimed = self._claims.pop(reply.job, None)
        if claimed is None:
            if reply.granted and reply.job not in self._jobs:
                self._cache.tell(Release(reply.job))
            return
        granted = [number for _, number, _, _ in reply.granted]
        settled = claimed.numbers if not reply.num_refused else granted
        self._set_stored(claimed.request, claimed.group, settled)
        self._drop(Drop.NO_ROOM, reply.num_refused)
        if not granted:
            return
        index, names = self._ledger.groups[claimed.group].index, claimed.request.names
        pages = [index.page(names[number]) for number in granted]
        if all(page is not None for page in pages):
            self._store(claimed, reply, [page for page in pages if page is not None], now)
        else:
            self._give_back(claimed, granted, reply.job, now)

    def _store(self, claimed: _Claimed, reply: ClaimReply, pages: list[int], now: float) -> None:
        slots = [slot for _, _, slots, _ in reply.granted for slot in slots]
        generations = [generation for *_, generations in reply.granted for generation in generations]
        last_step = self._pipeline.next_step - 1  # no page in the index is completed by a later plan
        message = StorePages(reply.job, claimed.group, pages, slots, generations, last_step)
        granted = tuple(number for _, number, _, _ in reply.granted)
        if self._jobs.begin(message, self._job_ended, now):
            self._stores[reply.job] = _Claimed(claimed.request, claimed.group, granted, claimed.deadline)
            self._statistics.num_started += 1
        else:
            self._clear_stored(claimed.request, claimed.group, granted)
            self._drop(Drop.AWAY, len(granted))

    def _give_back(self, claimed: _Claimed, granted: list[int], job: JobId, now: float) -> None:
        """Some pages have gone meanwhile: a job stores all that was granted or nothing. Claim anew what is left."""
        request, group = claimed.request, claimed.group
        self._cache.tell(Release(job))
        self._clear_stored(request, group, granted)
        index = self._ledger.groups[group].index
        left = [number for number in granted if request.names[number] in index]
        self._drop(Drop.EVICTED, len(granted) - len(left))
        self._claim_named(request, group, sum(1 << number for number in left), now)

    def _job_ended(self, job: JobId, result: JobResult, seconds: float) -> None:
        claimed = self._stores.pop(job)
        num_pages = len(claimed.numbers)
        self._statistics.ended(result, num_pages, num_pages * self._page_bytes[claimed.group], seconds)
        if result is not JobResult.DONE:
            self._clear_stored(claimed.request, claimed.group, claimed.numbers)

    @staticmethod
    def _set_stored(request: Request, group: str, numbers: Iterable[int]) -> None:
        request.stored[group] = request.stored.get(group, 0) | sum(1 << number for number in numbers)

    @staticmethod
    def _clear_stored(request: Request, group: str, numbers: Iterable[int]) -> None:
        request.stored[group] = request.stored.get(group, 0) & ~sum(1 << number for number in numbers)

    # --- what ends waiting ---

    def distrust(self, names: frozenset[bytes]) -> None:
        """These pages may hold nonsense: stop their stores as far as that is possible."""
        self._put_off = {key: mask for key, mask in self._put_off.items() if names.isdisjoint(key[0].names)}
        for job, claimed in self._stores.items():
            if any(claimed.request.names[number] in names for number in claimed.numbers):
                self._jobs.cancel(job)

    def drop_claims(self, reason: Drop, root: bytes | None = None) -> None:
        """Nobody will answer, or the answers are not wanted any more; root: only those under it."""
        for job, claimed in list(self._claims.items()):
            if root is None or claimed.request.root == root:
                del self._claims[job]
                self._drop(reason, len(claimed.numbers))
        for key, mask in list(self._put_off.items()):
            if root is None or key[0].root == root:
                del self._put_off[key]
                self._drop(reason, mask.bit_count())

    def lease_lost(self, job: JobId) -> None:
        """The manager has taken the slots back."""
        self._jobs.cancel(job)

    def check_deadlines(self, now: float) -> None:
        """A reply that is late is none; its slots are given back when it comes."""
        while (first := next(iter(self._claims.items()), None)) is not None and first[1].deadline <= now:
            del self._claims[first[0]]
            self._drop(Drop.LATE, len(first[1].numbers))
            self._cache.missed()

    def next_deadline(self) -> float | None:
        """When `check_deadlines` has something to do."""
        first = next(iter(self._claims.values()), None)
        return first.deadline if first is not None else None
