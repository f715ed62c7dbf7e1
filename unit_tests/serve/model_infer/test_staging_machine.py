"""Random jobs, cancels, steps, reuse and faults: one answer a job, and nothing written that should not be."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.types import JobId, JobResult
from unit_tests.serve.model_infer.staging_bench import Bench, Rank

NUM_SLOTS = 8
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "load", "cancel", "step", "stale_store", "poll"]),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(1, 3),
    ),
    max_size=30,
)
FAULTS = st.sampled_from(["", "host.copy_out:fail:p=0.3,host.copy_in:bitflip:p=0.3", "host.copy_in:delay=0.001:p=0.5"])


class Player:
    """Plays router and manager. A slot is used by one store at a time, as the manager's claims make sure."""

    def __init__(self, bench: Bench, rank: Rank) -> None:
        self.bench, self.rank = bench, rank
        self.jobs: list[JobId] = []
        self.contents: dict[JobId, tuple[list[int], list[int]]] = {}  # stores: pages and slots
        self.refused_slots: set[int] = set()
        self.busy: dict[int, JobId] = {}
        self.step = 0

    def play(self, action: str, first: int, count: int) -> None:
        slots = [(first + index) % NUM_SLOTS for index in range(count)]
        if action == "store":
            self._store(slots)
        elif action == "stale_store" and not self._are_busy(slots):
            old = self.bench.arena.generation[slots].tolist()
            self.bench.assign(slots[0])
            self.refused_slots.add(slots[0])
            self.jobs.append(self.rank.send_store(slots[:1], slots[:1], old[:1], after_step=self.step + count - 2))
        elif action == "load" and not self._are_busy(slots):
            self.jobs.append(self.rank.send_load([16 + slot for slot in slots], slots))
        elif action == "cancel" and self.jobs:
            self.rank.cancel(self.jobs[-1 - first % len(self.jobs)])
        elif action == "step":
            self.step += 1
            self.rank.engine.complete_step(self.step)
        else:
            self.rank.engine.poll_finished()

    def _store(self, slots: list[int]) -> None:
        if self._are_busy(slots):
            return
        self.bench.assign(*slots)
        self.bench.arena.payload[slots] = 0
        self.refused_slots.difference_update(slots)
        pages = [(slot + 3) % 16 for slot in slots]
        job = self.rank.send_store(pages, slots, after_step=self.step + len(slots) - 2)
        self.jobs.append(job)
        self.contents[job] = (pages, slots)
        self.busy.update(dict.fromkeys(slots, job))

    def _are_busy(self, slots: list[int]) -> bool:
        """A store may still write into them, or a load read them."""
        answered = {answer[0] for answer in self.rank.answerer.answers}
        return any(slot in self.busy and self.busy[slot] not in answered for slot in slots) or any(
            job not in answered for job in self.jobs if job not in self.contents
        )

    def finish(self) -> None:
        self.rank.engine.complete_step(self.step + 10)
        self.rank.wait_answers(*self.jobs)
        time.sleep(0.002)
        self.rank.engine.poll_finished()

    def check(self) -> None:
        answers = self.rank.answerer.answers
        assert sorted(answer[0].counter for answer in answers) == sorted(job.counter for job in self.jobs)
        results = {answer[0]: answer[1] for answer in answers}
        size = self.rank.pool.shape[1]
        for slot, job in self.busy.items():
            pages, slots = self.contents[job]
            if results[job] is JobResult.DONE and slot not in self.refused_slots:
                page = self.rank.pool[pages[slots.index(slot)]].numpy()
                assert (self.bench.arena.payload[slot, :size] == page).all()
        for slot in self.refused_slots:
            assert not self.bench.arena.checksum[slot].any()


@given(ACTIONS, FAULTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_job_has_one_answer(actions: list[tuple[str, int, int]], faults: str, is_sync: bool):
    bench = Bench(num_slots=NUM_SLOTS)
    bench.assign(*range(NUM_SLOTS))
    rank = bench.rank(faults=faults, is_sync=is_sync)
    for mover in rank.parts.movers.values():
        mover.engine.batch_bytes = rank.pool.shape[1]  # a cancel may come between any two pages
    player = Player(bench, rank)
    try:
        for action in actions:
            player.play(*action)
        player.finish()
        player.check()
    finally:
        bench.close()


@given(st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True), st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_nothing_is_written_from_a_refused_generation_on(slots: list[int], place: int):
    """One page a batch: pages before the stale one are written, that one and those behind it are not."""
    bench = Bench(num_slots=16)
    bench.assign(*range(16))
    rank = bench.rank(is_sync=True)
    for mover in rank.parts.movers.values():
        mover.engine.batch_bytes = 1
    place %= len(slots)
    generations = bench.arena.generation[slots].tolist()
    bench.assign(slots[place])
    assert rank.store(slots, slots, generations=generations) is JobResult.FAILED
    written = [bool(bench.arena.payload[slot].any()) for slot in slots]
    assert written == [index < place for index in range(len(slots))]
    assert (bench.arena.checksum[slots].any(axis=1) == np.array(written)).all()
    bench.close()
