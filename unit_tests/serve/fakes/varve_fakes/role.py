"""A child of any role for launcher tests.

$VARVE_FAKE holds JSON that maps `role` or `role-index` to a behaviour; $VARVE_FAKE_EVENTS names a file that gets one
JSON line for each thing that happens.
"""

import json
import os
import select
import time
from typing import Any

from serve.ipc.child import ChildContext, StartError
from serve.ipc.messages import ChildReady, Message, Progress, StopChild
from serve.ipc.request_table import RequestTable


def note(context: ChildContext, event: str, **facts: Any) -> None:
    line = {"role": context.role, "index": context.index, "epoch": context.epoch, "event": event, **facts}
    line |= {"time": time.monotonic(), "pid": os.getpid(), "restarts": context.restarts}
    with open(os.environ["VARVE_FAKE_EVENTS"], "a") as file:
        file.write(json.dumps(line) + "\n")


def main(context: ChildContext) -> None:
    behaviours = json.loads(os.environ.get("VARVE_FAKE", "{}"))
    behaviour = behaviours.get(f"{context.role}-{context.index}", behaviours.get(context.role, "serve"))
    note(context, "start", threads=os.environ["OMP_NUM_THREADS"])
    before_ready(context, behaviour)
    RequestTable.attach(context.fds["table"])
    context.parent.send(ChildReady(context.role, context.index, ready_info(context, behaviour)))
    if behaviour == "die_after_restart" and context.restarts:
        os._exit(9)
    serve(context, behaviour)
    note(context, "stop")


def before_ready(context: ChildContext, behaviour: str) -> None:
    if behaviour == "fail":
        raise StartError("the weights do not\nfit into memory")
    if behaviour == "crash":
        os._exit(3)
    if behaviour == "hang" or (behaviour == "hang_after_restart" and context.restarts):
        context.parent.send(Progress(context.role, context.index, "loading weights", 3, 10))
        time.sleep(60)
    if behaviour == "spin":
        while True:
            pass
    if context.role == "worker":
        for done in range(0, 11, 5):
            context.parent.send(Progress(context.role, context.index, "loading weights", done, 10))


def ready_info(context: ChildContext, behaviour: str) -> dict[str, object]:
    if context.role != "worker":
        return {}
    digest = "ee" if behaviour == "other_weights" else "ab"
    return {
        "num_pages": {"full": 100 - context.index},
        "block_digests": {0: digest * 32, context.index + 1: "cd" * 32},
        "memory": {"num_tokens": 6400, "weights": 1 << 20, "pool_bytes": 3 << 20},
        "phases": {"load weights": 0.25 * (context.index + 1)},
    }


def serve(context: ChildContext, behaviour: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        select.select([context.parent], [], [], 1)
        for message in context.parent.receive():
            note_message(context, message)
            if isinstance(message, StopChild) and behaviour != "ignore_stop":
                if context.role == "httpserver" and behaviour == "drain":
                    time.sleep(0.5)
                return


def note_message(context: ChildContext, message: Message) -> None:
    facts = {name: getattr(message, name) for name in message.__struct_fields__}
    note(context, type(message).__name__, facts=facts)
