from typing import Any

import pytest

from serve.errors import LaunchError
from serve.launcher.child_process import ChildSpec, ChildStatus
from serve.launcher.restart_policy import RestartPolicy
from serve.launcher.service import Service
from unit_tests.serve.fakes.varve_fakes.children import FakeChild, FakeChildren


class Bench:
    def __init__(self) -> None:
        self.children = FakeChildren()
        children: Any = self.children
        self.service = Service(children, self.spec, 30.0, RestartPolicy())
        self.service.start(0.0)

    @staticmethod
    def spec(restarts: int) -> ChildSpec:
        return ChildSpec("httpserver", 2, 1, "module", restarts=restarts)

    @property
    def child(self) -> FakeChild:
        return self.children.spawned[-1]

    def make_ready(self, now: float) -> None:
        self.child.status, self.child.ready_at = ChildStatus.READY, now
        self.service.on_ready()

    def end(self, now: float) -> None:
        self.service.on_end(self.child, now)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_comes_back_with_the_same_index(bench: Bench) -> None:
    bench.make_ready(1.0)
    assert bench.service.is_ready
    bench.end(100.0)
    assert not bench.service.is_ready
    bench.service.tick(100.0)
    assert (bench.child.spec.index, bench.child.spec.restarts) == (2, 1)


def test_a_death_before_it_was_ever_ready_ends_the_launch(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="httpserver-2 died"):
        bench.end(1.0)


def test_a_first_start_that_takes_too_long_ends_the_launch(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="not ready within 30 s: httpserver-2"):
        bench.service.tick(30.0)


def test_a_restart_that_takes_too_long_is_killed(bench: Bench) -> None:
    bench.make_ready(1.0)
    bench.end(100.0)
    bench.service.tick(100.0)
    bench.service.tick(130.0)
    assert bench.child.was_killed
    assert bench.child.failure == "not ready within 30 s: httpserver-2"


def test_one_that_keeps_dying_is_given_up(bench: Bench) -> None:
    now = 0.0
    for _ in range(4):
        bench.make_ready(now)
        bench.end(now + 1)
        now += 40.0
        bench.service.tick(now)
    bench.make_ready(now)
    with pytest.raises(LaunchError, match="httpserver-2 keeps failing, giving up"):
        bench.end(now + 1)
