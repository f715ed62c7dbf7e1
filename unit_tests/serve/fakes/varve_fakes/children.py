"""Children that are no processes, for tests of what decides over them."""

from dataclasses import dataclass, field
from typing import Any

from serve.ipc.messages import Progress
from serve.launcher.child_process import ChildSpec, ChildStatus


@dataclass(eq=False)
class FakeChild:
    spec: ChildSpec
    status: ChildStatus = ChildStatus.STARTING
    ready_at: float | None = None
    progress: Progress | None = None
    failure: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    was_killed: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    def kill(self) -> None:
        self.was_killed = True

    def describe_end(self) -> str:
        return self.failure or f"{self.name} died"


@dataclass
class FakeChildren:
    spawned: list[FakeChild] = field(default_factory=list)

    def spawn(self, spec: ChildSpec) -> FakeChild:
        self.spawned.append(FakeChild(spec))
        return self.spawned[-1]
