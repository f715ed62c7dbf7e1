"""Entry of a worker process."""

import os
import sys

from serve.ipc.child import ChildContext

# The compute thread runs long native calls; that of page jobs, and the copies, need the interpreter only for moments.
SWITCH_INTERVAL_S = 0.001


def main(context: ChildContext) -> None:
    """Start, serve, stop. Raises StartError when the worker cannot start, anything else when it must be restarted."""
    # libgomp reads this when torch is imported: its threads would otherwise spin for milliseconds after each torch
    # operation, on the cores that the kernels' own threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    from serve.model_infer.startup import start_worker

    worker, ready = start_worker(context)
    try:
        worker.run(ready)
    finally:
        worker.close()
