"""A child for the tests of serve.ipc.child: what it does depends on its index."""

import os
import signal
import time
from pathlib import Path

from serve.ipc.child import ChildContext, StartError
from serve.ipc.messages import ChildReady, StopChild


def main(context: ChildContext) -> None:
    {0: report_and_wait, 1: fail_cleanly, 2: raise_unexpectedly, 3: compute_for_ever}[context.index](context)


def report_and_wait(context: ChildContext) -> None:
    info: dict[str, object] = {
        "pid": os.getpid(),
        "epoch": context.epoch,
        "model": context.model,
        "run_dir": str(context.run_dir),
        "ignores": [signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)],
        "blocked": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "name": Path("/proc/self/comm").read_text().strip(),
    }
    context.parent.send(ChildReady(context.role, context.index, info))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if any(isinstance(message, StopChild) for message in context.parent.receive()):
            return
        time.sleep(0.01)


def fail_cleanly(context: ChildContext) -> None:
    raise StartError("the model has no weights")


def raise_unexpectedly(context: ChildContext) -> None:
    raise ZeroDivisionError("boom")


def compute_for_ever(context: ChildContext) -> None:
    context.parent.send(ChildReady(context.role, context.index, {}))
    while True:
        pass
