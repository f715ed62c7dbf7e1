"""Questions to the cache manager. Whatever happens to it, a question costs at most its deadline."""

from collections.abc import Callable
from dataclasses import dataclass

from serve.ipc.messages import Acquire, Claim, Message, Probe, ProbeReply
from serve.router.request import Request


@dataclass(frozen=True)
class ProbePolicy:
    """deadline_s: an answer later than this is a miss. After `max_silence` misses in a row one probe each `retry_s`.

    A manager that only stalls is asked again soon; one that hangs costs one request in `retry_s` its deadline.
    """

    deadline_s: float = 0.05
    max_silence: int = 3
    retry_s: float = 0.5


@dataclass(frozen=True, slots=True)
class _Pending:
    request: Request
    deadline: float


class CacheClient:
    """Probes in flight, and whether the manager is worth asking.

    `send` gives False when the manager's mailbox cannot take more; None: there is no manager.
    """

    def __init__(self, send: Callable[[Message], bool] | None, policy: ProbePolicy) -> None:
        self._send = send
        self._policy = policy
        self._next_id = 0
        self._silence = 0
        self._is_down = False
        self._quiet_until = 0.0
        self._closed_until = 0.0
        self._pending: dict[int, _Pending] = {}  # in order of deadline

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_manager(self) -> bool:
        """There is a cache manager at all; it may be away."""
        return self._send is not None

    def ask(self, request: Request, num_pages: int, now: float) -> bool:
        """Send a probe for the request's first `num_pages` pages; False: nothing to wait for, treat as a miss."""
        if self._send is None or num_pages == 0 or not self._is_open(now):
            return False
        if self._silence >= self._policy.max_silence:
            self._quiet_until = now + self._policy.retry_s
        probe = Probe(self._next_id, request.key.slot, request.key.generation, num_pages)
        if not self._send(probe):
            return False
        self._pending[self._next_id] = _Pending(request, now + self._policy.deadline_s)
        self._next_id += 1
        return True

    def request(self, message: Acquire | Claim, now: float) -> bool:
        """Send what wants a reply; False: nobody answers now. Only probes find out whether a silent manager is back."""
        return self._is_open(now) and self._silence < self._policy.max_silence and self.tell(message)

    def tell(self, message: Message) -> bool:
        """Send what has no reply; False: it is lost."""
        return self._send is not None and self._send(message)

    def missed(self) -> None:
        """A reply did not come in time."""
        self._silence += 1

    def close_until(self, deadline: float) -> None:
        """Ask nothing until then."""
        self._closed_until = deadline

    def _is_open(self, now: float) -> bool:
        return not self._is_down and now >= self._quiet_until and now >= self._closed_until

    def take(self, reply: ProbeReply) -> Request | None:
        """Whose probe this answers; None when it comes too late."""
        self.heard()
        pending = self._pending.pop(reply.probe_id, None)
        return pending.request if pending is not None else None

    def cancel(self, request: Request) -> None:
        """Forget the request's probe."""
        for probe_id, pending in self._pending.items():
            if pending.request is request:
                del self._pending[probe_id]
                return

    def pop_expired(self, now: float) -> list[Request]:
        """Requests whose answer did not come in time."""
        expired = []
        while (first := next(iter(self._pending.items()), None)) is not None and first[1].deadline <= now:
            expired.append(self._pending.pop(first[0]).request)
            self.missed()
        return expired

    def manager_down(self) -> list[Request]:
        """The manager has gone: its probes are misses, and nothing is asked until `manager_up`."""
        self._is_down = True
        return self.drop_all()

    def drop_all(self) -> list[Request]:
        """Forget all probes; returns whose they were."""
        missed = [pending.request for pending in self._pending.values()]
        self._pending.clear()
        return missed

    def manager_up(self) -> None:
        """There is a manager again."""
        self._is_down = False
        self.heard()

    def heard(self) -> None:
        """A reply has come. It may be the last of a manager that has gone since: that one stays down."""
        self._silence = 0
        self._quiet_until = 0.0

    def next_deadline(self) -> float | None:
        """When `pop_expired` will next have something."""
        first = next(iter(self._pending.values()), None)
        return first.deadline if first is not None else None
