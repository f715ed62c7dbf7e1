"""How many pages each state group gets, decided once at start."""

from collections.abc import Mapping
from dataclasses import dataclass

from models.state_layout import HitPolicy
from serve.ipc.child import StartError

# Without --max_total_token_num a CPU pool is this big at most, or twice the longest request if that is more, up to the
# second limit: the machine is shared with other programs, and cached prefixes fill the whole pool in time.
_CPU_POOL_LIMIT = 3 << 29
_CPU_LONG_POOL_LIMIT = 4 << 30
# Tokens that the default CPU pool provides for each request that may run at once.
_CPU_TOKENS_PER_REQUEST = 256


# A running request has a working page, one that decoding refreshes, and one for its prompt's last boundary.
_CHECKPOINTS_A_REQUEST = 3
# Checkpoints that are small beside the keys and values get at least this share of their bytes.
_CHECKPOINT_SHARE = 8


@dataclass(frozen=True)
class PageCost:
    """One group's page: tokens that it covers, and bytes that it takes on this rank's device. window_tokens: of its
    layers, in groups of that policy."""

    page_tokens: int
    bytes_per_page: int
    policy: HitPolicy = HitPolicy.ALL_PAGES
    window_tokens: int = 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    @property
    def window_pages(self) -> int:
        """Pages that a window may meet."""
        return self.pages_for(self.window_tokens)


@dataclass(frozen=True)
class MemoryRequest:
    """What the flags ask for, and what there is.

    is_length_fixed: the user asked for max_req_total_len; else the launcher lowers it to what the pool holds.
    budget_bytes: memory that the pools may take on this rank. chunk_tokens: of a prompt in one step.
    checkpoint_interval: tokens of a prompt between two checkpoints.
    """

    max_req_total_len: int
    is_length_fixed: bool
    running_max_req_size: int
    max_total_token_num: int | None
    mem_fraction: float
    budget_bytes: int
    is_cpu: bool
    chunk_tokens: int = 2048
    checkpoint_interval: int = 2048


@dataclass(frozen=True)
class MemoryPlan:
    """Pages by group. num_tokens: tokens that FULL groups hold; num_requests: that find their windows and working
    pages at a time; limit: what set the number of tokens."""

    num_pages: dict[str, int]
    num_tokens: int
    num_requests: int
    pool_bytes: int
    budget_bytes: int
    limit: str

    def summary(self) -> dict[str, object]:
        """Plain data for the summary that the launcher prints at start; numbers are bytes."""
        return {
            "pool": self.pool_bytes,
            "budget": self.budget_bytes,
            "limit": self.limit,
            "num_requests_at_a_time": self.num_requests,
        }


class _Division:
    """How many pages every group gets where FULL groups hold so many tokens."""

    def __init__(self, costs: Mapping[str, PageCost], request: MemoryRequest, num_requests: int) -> None:
        self._costs = costs
        self._request = request
        self._full_bytes = sum(
            cost.bytes_per_page / cost.page_tokens for cost in costs.values() if cost.policy is HitPolicy.ALL_PAGES
        )
        self.num_requests = num_requests
        self.step = max(cost.page_tokens for cost in costs.values())

    def pages(self, num_tokens: int) -> dict[str, int]:
        """By group."""
        return {name: self._pages(cost, num_tokens) for name, cost in self._costs.items()}

    def num_bytes(self, num_tokens: int) -> int:
        """Of all pools."""
        return sum(self._pages(cost, num_tokens) * cost.bytes_per_page for cost in self._costs.values())

    def affordable_tokens(self, num_bytes: int) -> int:
        """Most tokens, in steps of the longest page, with which all pools fit in `num_bytes`."""
        low, high = 0, 1
        while self.num_bytes(high * self.step) <= num_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.num_bytes(middle * self.step) <= num_bytes else (low, middle)
        return low * self.step

    def _pages(self, cost: PageCost, num_tokens: int) -> int:
        if cost.policy is HitPolicy.ALL_PAGES:
            return cost.pages_for(num_tokens)
        if cost.policy is HitPolicy.TRAILING_PAGES:
            return self._window_pages(cost, num_tokens)
        return self._checkpoints(cost, num_tokens)

    def _window_pages(self, cost: PageCost, num_tokens: int) -> int:
        """Windows of the running requests and the chunks of two plans; for cached prefixes as much again, or a window
        an interval of tokens where that is more. All tokens where the model has nothing but windows."""
        everything = cost.pages_for(num_tokens)
        if self._full_bytes:
            chunks = 2 * (cost.pages_for(self._request.chunk_tokens) + 1)
            running = self.num_requests * (cost.window_pages + 2) + chunks
            cached = max(running, num_tokens // self._request.checkpoint_interval * cost.window_pages)
            everything = min(everything, running + cached)
        return max(everything, cost.window_pages + 2)

    def _checkpoints(self, cost: PageCost, num_tokens: int) -> int:
        """Those of the running requests with what one of them begins with; for cached prefixes one a request, and one
        an interval as far as they take no more than the tokens do; more where they are small."""
        running = _CHECKPOINTS_A_REQUEST * self.num_requests + 1
        token_bytes = int(self._full_bytes * num_tokens)
        equal = token_bytes // max(1, cost.bytes_per_page)
        cached = self.num_requests + min(num_tokens // self._request.checkpoint_interval, equal)
        small = equal // _CHECKPOINT_SHARE
        return running + max(cached, min(small, cost.pages_for(num_tokens)))


def plan_memory(costs: Mapping[str, PageCost], request: MemoryRequest) -> MemoryPlan:
    """Pages for every group; FULL groups cover the same number of tokens.

    What windows and working pages take for `running_max_req_size` requests is at most half of the memory: fewer find
    theirs at a time where it is little. Raises StartError with one line when a request of the length that the user
    asked for would not fit, or not a page.
    """
    division = _divide(costs, request, request.budget_bytes)
    needed = request.max_req_total_len + 1  # the token computed ahead of the last result
    if not request.is_length_fixed:
        needed = min(needed, division.step)
    if request.max_total_token_num is not None:
        num_tokens, limit = _demanded_tokens(division, request), "--max_total_token_num"
    else:
        division, num_tokens, limit = _default_tokens(costs, request, division)
    if num_tokens < needed:
        raise StartError(_too_small(division, request, needed))
    num_pages = division.pages(num_tokens)
    return MemoryPlan(
        num_pages, num_tokens, division.num_requests, division.num_bytes(num_tokens), request.budget_bytes, limit
    )


def _divide(costs: Mapping[str, PageCost], request: MemoryRequest, num_bytes: int) -> _Division:
    """For as many running requests as leave half of `num_bytes` to tokens, at least one."""
    for num_requests in range(request.running_max_req_size, 1, -1):
        division = _Division(costs, request, num_requests)
        # What requests need whatever the tokens: pools of one page of tokens have no more than that.
        if _fixed_bytes(costs, division) <= num_bytes // 2:
            return division
    return _Division(costs, request, 1)


def _fixed_bytes(costs: Mapping[str, PageCost], division: _Division) -> int:
    pages = division.pages(division.num_requests * division.step)
    return sum(
        pages[name] * cost.bytes_per_page for name, cost in costs.items() if cost.policy is not HitPolicy.ALL_PAGES
    )


def _demanded_tokens(division: _Division, request: MemoryRequest) -> int:
    wanted = request.max_total_token_num or 0
    if division.num_bytes(wanted) > request.budget_bytes:
        raise StartError(
            f"--max_total_token_num {wanted} needs {_mib(division.num_bytes(wanted))} of memory, but only "
            f"{_mib(request.budget_bytes)} may be used (--mem_fraction {request.mem_fraction})"
        )
    return wanted


def _default_tokens(
    costs: Mapping[str, PageCost], request: MemoryRequest, division: _Division
) -> tuple[_Division, int, str]:
    """Tokens that the pools shall hold, why that many, and the division that goes with them."""
    if not request.is_cpu:
        return division, division.affordable_tokens(request.budget_bytes), "--mem_fraction"
    longest = request.max_req_total_len + 1
    ceiling = min(_CPU_LONG_POOL_LIMIT, max(_CPU_POOL_LIMIT, _Division(costs, request, 2).num_bytes(2 * longest)))
    division = _divide(costs, request, min(ceiling, request.budget_bytes))
    modest = 2 * longest + request.running_max_req_size * _CPU_TOKENS_PER_REQUEST
    modest = min(modest, max(longest, division.affordable_tokens(ceiling)))
    affordable = division.affordable_tokens(request.budget_bytes)
    return (division, modest, "default") if modest <= affordable else (division, affordable, "--mem_fraction")


def _too_small(division: _Division, request: MemoryRequest, needed: int) -> str:
    if request.max_total_token_num is not None:
        return (
            f"--max_total_token_num {request.max_total_token_num} cannot hold one request of "
            f"--max_req_total_len {request.max_req_total_len} (needs {needed})"
        )
    return (
        f"one request of --max_req_total_len {request.max_req_total_len} needs {_mib(division.num_bytes(needed))} of "
        f"memory, but only {_mib(request.budget_bytes)} may be used (--mem_fraction {request.mem_fraction}): "
        "lower --max_req_total_len or raise --mem_fraction"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
