"""How many pages each state group gets, decided once at start."""

from collections.abc import Mapping
from dataclasses import dataclass

from serve.ipc.child import StartError

# Without --max_total_token_num a CPU pool is this big at most, or twice the longest request if that is more, up to the
# second limit: the machine is shared with other programs, and cached prefixes fill the whole pool in time.
_CPU_POOL_LIMIT = 3 << 29
_CPU_LONG_POOL_LIMIT = 4 << 30
# Tokens that the default CPU pool provides for each request that may run at once.
_CPU_TOKENS_PER_REQUEST = 256


@dataclass(frozen=True)
class PageCost:
    """One group's page: tokens that it covers and bytes that it takes on this rank's device."""

    page_tokens: int
    bytes_per_page: int

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True)
class MemoryRequest:
    """What the flags ask for, and what there is.

    is_length_fixed: the user asked for max_req_total_len; else the launcher lowers it to what the pool holds.
    budget_bytes: memory that the pools may take on this rank.
    """

    max_req_total_len: int
    is_length_fixed: bool
    running_max_req_size: int
    max_total_token_num: int | None
    mem_fraction: float
    budget_bytes: int
    is_cpu: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Pages by group. num_tokens: tokens that the pools hold; limit: what set their number."""

    num_pages: dict[str, int]
    num_tokens: int
    pool_bytes: int
    budget_bytes: int
    limit: str

    def summary(self) -> dict[str, object]:
        """Plain data for the summary that the launcher prints at start; numbers are bytes."""
        return {"pool": self.pool_bytes, "budget": self.budget_bytes, "limit": self.limit}


def plan_memory(costs: Mapping[str, PageCost], request: MemoryRequest) -> MemoryPlan:
    """Pages for every group, each covering the same number of tokens.

    Raises StartError with one line when a request of the length that the user asked for would not fit, or not a page.
    """
    needed = request.max_req_total_len + 1  # the token computed ahead of the last result
    if not request.is_length_fixed:
        needed = min(needed, max(cost.page_tokens for cost in costs.values()))
    num_tokens, limit = _wanted_tokens(costs, request)
    if num_tokens < needed:
        raise StartError(_too_small(costs, request, num_tokens, needed))
    num_pages = {name: cost.pages_for(num_tokens) for name, cost in costs.items()}
    return MemoryPlan(num_pages, num_tokens, _pool_bytes(costs, num_tokens), request.budget_bytes, limit)


def _wanted_tokens(costs: Mapping[str, PageCost], request: MemoryRequest) -> tuple[int, str]:
    """Tokens that the pools shall hold, and why that many."""
    if request.max_total_token_num is not None:
        if _pool_bytes(costs, request.max_total_token_num) > request.budget_bytes:
            raise StartError(
                f"--max_total_token_num {request.max_total_token_num} needs "
                f"{_mib(_pool_bytes(costs, request.max_total_token_num))} of memory, but only "
                f"{_mib(request.budget_bytes)} may be used (--mem_fraction {request.mem_fraction})"
            )
        return request.max_total_token_num, "--max_total_token_num"
    affordable = _affordable_tokens(costs, request.budget_bytes)
    if not request.is_cpu:
        return affordable, "--mem_fraction"
    longest = request.max_req_total_len + 1
    ceiling = min(_CPU_LONG_POOL_LIMIT, max(_CPU_POOL_LIMIT, _pool_bytes(costs, 2 * longest)))
    modest = 2 * longest + request.running_max_req_size * _CPU_TOKENS_PER_REQUEST
    modest = min(modest, max(longest, _affordable_tokens(costs, ceiling)))
    return (modest, "default") if modest <= affordable else (affordable, "--mem_fraction")


def _affordable_tokens(costs: Mapping[str, PageCost], num_bytes: int) -> int:
    """Most tokens, in steps of the longest page, whose pages of all groups fit in `num_bytes`."""
    step = max(cost.page_tokens for cost in costs.values())
    return num_bytes // _pool_bytes(costs, step) * step


def _pool_bytes(costs: Mapping[str, PageCost], num_tokens: int) -> int:
    return sum(cost.pages_for(num_tokens) * cost.bytes_per_page for cost in costs.values())


def _too_small(costs: Mapping[str, PageCost], request: MemoryRequest, num_tokens: int, needed: int) -> str:
    if request.max_total_token_num is not None:
        return (
            f"--max_total_token_num {request.max_total_token_num} cannot hold one request of "
            f"--max_req_total_len {request.max_req_total_len} (needs {needed})"
        )
    return (
        f"one request of --max_req_total_len {request.max_req_total_len} needs {_mib(_pool_bytes(costs, needed))} of "
        f"memory, but only {_mib(request.budget_bytes)} may be used (--mem_fraction {request.mem_fraction}): "
        "lower --max_req_total_len or raise --mem_fraction"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
