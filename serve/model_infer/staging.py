"""The worker's side of the host tier: page jobs in, copies on two streams, one answer a job."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from serve.ipc.messages import CancelJob, LoadPages, Resync, StorePages
from serve.ipc.wakeup import Wakeup
from serve.model_infer.copy_stream import CopyStream, run_guarded
from serve.model_infer.host_pages import RankPages
from serve.model_infer.job_answers import JobAnswerer
from serve.model_infer.page_mover import PageMover
from serve.model_infer.transfer import BadJobError, Direction, Outcome, Transfer, make_transfer
from serve.multi_level_cache.fault_injector import FaultInjector
from serve.multi_level_cache.host_arena import HostArena, manager_of
from serve.types import JobId, JobResult

# Stores wait until the step that they follow has run; pages of waiting stores cannot be reused on the device.
MAX_WAITING_STORE_BYTES = 512 << 20
_MAX_REMEMBERED = 4096
_JOIN_TIMEOUT_S = 5.0
# Added to the process's niceness: on a CPU loads go beside compute, and stores a little behind. A lower priority would
# save compute nothing, since the copies are to be made at some time, and starves stores on busy cores.
_NICENESS = {Direction.LOAD: 0, Direction.STORE: 1}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagingParts:
    """What a `StagingEngine` works with. movers: one a direction, with an engine of its own each.

    is_sync: copy on the calling thread, without overlap.
    """

    arena: HostArena
    groups: dict[str, RankPages]
    movers: Mapping[Direction, PageMover]
    injector: FaultInjector | None = None
    is_sync: bool = False
    max_waiting_bytes: int = MAX_WAITING_STORE_BYTES


class StagingEngine:
    """`PageJobs` over a host arena. All methods on one thread, which alone answers.

    A job is in `_jobs` from its message to its answer. A store waits in `_held` until its step has run, then it goes to
    the store's stream; a load goes to the load's stream at once: the router sends a plan that uses loaded pages after
    all ranks' DONE, and reserves device pages only when every plan that used them has ended.
    """

    def __init__(self, parts: StagingParts, answerer: JobAnswerer) -> None:
        self._parts = parts
        self._answerer = answerer
        self._jobs: dict[JobId, Transfer] = {}
        self._held: list[Transfer] = []
        self._recent: OrderedDict[JobId, None] = OrderedDict()
        self._waiting_bytes = 0
        self._last_step = -1
        self._last_nonce = 0
        self._counts: Counter[str] = Counter()
        self._wakeup = Wakeup()
        self._streams: dict[Direction, CopyStream] = {}
        if not parts.is_sync:
            for direction, mover in parts.movers.items():
                name = f"staging-{direction.value}"
                self._streams[direction] = CopyStream(name, mover.run, self._wakeup, _NICENESS[direction])

    # --- messages ----------------------------------------------------------------------------------------------------

    def submit(self, message: LoadPages | StorePages) -> None:
        """A job. One that cannot be done is answered at once."""
        if message.job in self._jobs or message.job in self._recent:
            self._counts["duplicates"] += 1
            return
        try:
            transfer = make_transfer(message, self._parts.groups, self._parts.arena)
        except BadJobError as error:
            logger.error("a job is refused: %s", error)
            self._answer(message.job, Outcome(JobResult.FAILED, str(error)))
            return
        if transfer.direction is Direction.LOAD:
            self._jobs[transfer.job] = transfer
            self._start(transfer)
        else:
            self._accept_store(transfer)

    def _accept_store(self, transfer: Transfer) -> None:
        refusal = self._refusal(transfer)
        if refusal is not None:
            self._answer(transfer.job, refusal)
            return
        self._jobs[transfer.job] = transfer
        self._waiting_bytes += transfer.num_bytes
        self._held.append(transfer)
        self._release_stores()

    def _refusal(self, store: Transfer) -> Outcome | None:
        oldest = min((number for each in store.objects for number in each.generations), default=None)
        if oldest is not None and manager_of(oldest) < self._last_nonce:
            return Outcome(JobResult.FAILED, "claimed from an earlier cache manager")
        if self._waiting_bytes and self._waiting_bytes + store.num_bytes > self._parts.max_waiting_bytes:
            return Outcome(JobResult.DROPPED, "too many stores are waiting")
        return None

    def cancel(self, message: CancelJob) -> None:
        """A job that has not started ends now; one that has ends after its batch."""
        transfer = self._jobs.get(message.job)
        if transfer is None:
            return
        transfer.cancel()
        if transfer in self._held:
            self._held.remove(transfer)
        elif transfer.direction not in self._streams or not self._streams[transfer.direction].take_back(transfer):
            return
        self._finish(transfer, Outcome(JobResult.CANCELLED))

    def resync(self, message: Resync) -> None:
        """Tell which slots may still be touched; older claims that come from now on are refused."""
        self._last_nonce = max(self._last_nonce, message.nonce)
        slots = sorted({slot for transfer in self._jobs.values() for slot in transfer.slots})
        self._answerer.tell_slots(message.nonce, list(self._jobs), slots)

    @property
    def has_held(self) -> bool:
        """Whether stores wait for their steps. Any thread may ask."""
        return bool(self._held)

    # --- steps and completions ---------------------------------------------------------------------------------------

    def complete_step(self, step: int) -> None:
        """Stores that follow this plan may start."""
        self._last_step = step
        if self._held:
            self._release_stores()

    def _release_stores(self) -> None:
        ready = [each for each in self._held if each.after_step is None or each.after_step <= self._last_step]
        self._held = [each for each in self._held if each not in ready]
        for transfer in ready:
            self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        mover = self._parts.movers[transfer.direction]
        transfer.fence = mover.engine.make_fence()
        stream = self._streams.get(transfer.direction)
        if stream is not None:
            stream.submit(transfer)
        else:
            self._finish(transfer, run_guarded(mover.run, transfer))

    def poll_finished(self) -> None:
        """Answer what has ended on the streams."""
        self._wakeup.clear()
        for stream in self._streams.values():
            for transfer, outcome in stream.poll_finished():
                self._finish(transfer, outcome)

    def _finish(self, transfer: Transfer, outcome: Outcome) -> None:
        del self._jobs[transfer.job]
        if transfer.direction is Direction.STORE:
            self._waiting_bytes -= transfer.num_bytes
        self._count(transfer.direction, outcome)
        self._answer(transfer.job, outcome)

    def _answer(self, job: JobId, outcome: Outcome) -> None:
        self._recent[job] = None
        if len(self._recent) > _MAX_REMEMBERED:
            self._recent.popitem(last=False)
        self._counts[outcome.result.name.lower()] += 1
        if self._parts.injector is not None:
            self._parts.injector.reach("worker.before_answer")
        self._answerer.answer(job, outcome.result, outcome.detail, outcome.bad_slots)
        if self._parts.injector is not None:
            self._parts.injector.reach("worker.after_answer")

    # --- the rest ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """For the mailbox's poller."""
        return self._wakeup.fileno()

    def _count(self, direction: Direction, outcome: Outcome) -> None:
        name = direction.value
        self._counts[f"{name}_jobs"] += 1
        self._counts[f"{name}_bytes"] += outcome.num_bytes
        self._counts[f"{name}_us"] += round(outcome.seconds * 1e6)
        self._counts["bad_pages"] += len(outcome.bad_slots)

    def statistics(self) -> dict[str, object]:
        """Jobs by result, bytes and microseconds by direction, what waits, and injected faults."""
        faults = {} if self._parts.injector is None else {"faults": dict(self._parts.injector.counts)}
        waiting = {"unanswered": len(self._jobs), "waiting_store_bytes": self._waiting_bytes}
        return {**self._counts, **waiting, **faults}

    def inject(self, faults: str) -> None:
        """Other faults from now on. Raises FaultSpecError, RuntimeError without an injector. Any thread may call."""
        if self._parts.injector is None:
            raise RuntimeError("faults can only be changed with --fault_inject")
        self._parts.injector.arm(faults)

    def close(self) -> None:
        """End the streams after the batch at hand; unanswered jobs stay so."""
        for transfer in self._jobs.values():
            transfer.cancel()
        if self._parts.injector is not None:
            self._parts.injector.release()
        have_ended = [stream.close(_JOIN_TIMEOUT_S) for stream in self._streams.values()]
        if all(have_ended):
            self._wakeup.close()
            for mover in self._parts.movers.values():
                mover.engine.close()
        else:
            logger.error("a staging thread does not end")
