from typing import Any

import pytest

from serve.errors import LaunchError
from serve.ipc.messages import Progress
from serve.launcher.child_process import ChildSpec, ChildStatus
from serve.launcher.engine_group import EngineGroup, EngineState
from serve.launcher.restart_policy import RestartPolicy
from unit_tests.serve.fakes.varve_fakes.children import FakeChild, FakeChildren

TIMEOUT_S = 30.0


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.refusal: str | None = None

    def engine_up(self, group: EngineGroup) -> None:
        if self.refusal:
            raise LaunchError(self.refusal)
        self.heard.append(("up", group.epoch))

    def engine_down(self, group: EngineGroup) -> None:
        self.heard.append(("down", group.epoch))


class Bench:
    """A group of one router and two workers, with fake children."""

    def __init__(self) -> None:
        self.children, self.listener = FakeChildren(), Listener()
        children: Any = self.children
        self.group = EngineGroup(children, self.specs, self.listener, TIMEOUT_S, RestartPolicy())

    @staticmethod
    def specs(epoch: int, restarts: int) -> list[ChildSpec]:
        names = [("worker", 0), ("worker", 1), ("router", 0)]
        return [ChildSpec(role, index, epoch, "module", restarts=restarts) for role, index in names]

    @property
    def members(self) -> list[FakeChild]:
        return self.children.spawned[-3:]

    def make_ready(self, child: FakeChild, now: float) -> None:
        child.status, child.ready_at = ChildStatus.READY, now
        self.group.on_ready(child, now)  # type: ignore[arg-type]

    def end(self, child: FakeChild, now: float) -> None:
        child.status = ChildStatus.ENDED
        self.group.on_end(child, now)  # type: ignore[arg-type]

    def bring_up(self, now: float) -> None:
        for member in self.members:
            self.make_ready(member, now)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.group.start(0.0)
    return made


def test_it_is_up_when_the_last_member_is_ready(bench: Bench) -> None:
    for member in bench.members[:2]:
        bench.make_ready(member, 1.0)
    assert bench.group.state is EngineState.STARTING
    bench.make_ready(bench.members[2], 2.0)
    assert bench.group.state is EngineState.UP
    assert bench.listener.heard == [("up", 1)]


def test_one_death_kills_all_and_the_end_is_told_after_the_last_reaping(bench: Bench) -> None:
    bench.bring_up(1.0)
    members = bench.members
    bench.end(members[1], 100.0)
    assert all(member.was_killed for member in members if member is not members[1])
    bench.end(members[0], 100.1)
    assert bench.group.state is EngineState.REAPING
    assert bench.listener.heard == [("up", 1)]
    bench.end(members[2], 100.2)
    assert bench.listener.heard == [("up", 1), ("down", 1)]
    assert bench.group.reason == "worker-1 died"
    bench.group.tick(100.3)
    assert (bench.group.state, bench.group.epoch, bench.group.restarts) == (EngineState.STARTING, 2, 1)
    bench.bring_up(101.0)
    assert bench.listener.heard[-1] == ("up", 2)


def test_a_failure_before_the_first_time_up_ends_the_launch(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="router-0 died"):
        bench.end(bench.members[2], 1.0)


def test_a_first_start_that_takes_too_long_names_who_is_late(bench: Bench) -> None:
    bench.make_ready(bench.members[2], 1.0)
    bench.members[0].progress = Progress("worker", 0, "loading weights", 3, 10)
    bench.group.tick(TIMEOUT_S - 1)
    with pytest.raises(LaunchError, match=r"not ready within 30 s: worker-0 \(loading weights 3/10\), worker-1$"):
        bench.group.tick(TIMEOUT_S)


def test_a_restart_that_takes_too_long_is_killed_and_tried_again(bench: Bench) -> None:
    bench.bring_up(1.0)
    for member in bench.members:
        bench.end(member, 50.0)
    bench.group.tick(50.0)
    bench.group.tick(50.0 + TIMEOUT_S)
    assert bench.group.state is EngineState.REAPING
    assert all(member.was_killed for member in bench.members)
    for member in bench.members:
        bench.end(member, 81.0)
    bench.group.tick(81.0)
    assert (bench.group.state, bench.group.epoch) == (EngineState.STARTING, 3)


def test_a_group_that_keeps_dying_is_given_up(bench: Bench) -> None:
    bench.bring_up(1.0)
    now = 2.0

    def die() -> None:
        for member in bench.members:
            bench.end(member, now)

    for _ in range(4):
        die()
        now += 40.0
        bench.group.tick(now)
        assert bench.group.state is EngineState.STARTING
    with pytest.raises(LaunchError, match="the engine keeps failing, giving up: worker-0 died"):
        die()


def test_answers_that_make_no_engine_end_the_first_launch(bench: Bench) -> None:
    bench.listener.refusal = "ranks disagree"
    with pytest.raises(LaunchError, match="ranks disagree"):
        bench.bring_up(1.0)


def test_answers_that_make_no_engine_fail_a_restart(bench: Bench) -> None:
    bench.bring_up(1.0)
    for member in bench.members:
        bench.end(member, 50.0)
    bench.group.tick(50.0)
    bench.listener.refusal = "ranks disagree"
    bench.bring_up(51.0)
    assert bench.group.state is EngineState.REAPING
    assert bench.group.reason == "ranks disagree"


def test_a_child_of_an_earlier_epoch_changes_nothing(bench: Bench) -> None:
    stranger = FakeChild(ChildSpec("worker", 0, 0, "module"))
    bench.bring_up(1.0)
    bench.end(stranger, 2.0)
    assert bench.group.state is EngineState.UP


def test_moves_that_the_table_forbids_raise(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="from STARTING to STARTING"):
        bench.group.start(1.0)
