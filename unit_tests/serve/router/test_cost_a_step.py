"""The router's own cost: a step must not grow with the batch more than it must."""

import time

from serve.ipc.messages import StepResult
from unit_tests.serve.router.router_fakes import Harness, prompt_of


def median_turn_s(num_rows: int) -> float:
    """CPU seconds of the router for one steady decode step."""
    harness = Harness(num_pages=32 * num_rows, max_rows=num_rows, batch_max_tokens=4096, chunked_prefill_size=64)
    harness.submit_together([prompt_of(20, seed) for seed in range(num_rows)], max_tokens=400)
    while len(harness.router.engine.batch.decoding) < num_rows:
        harness.step_all()
    costs, rows = [], list(range(num_rows))
    for _ in range(150):
        step = harness.workers[0].plans.popleft().step
        result = StepResult(3, step, 0, 0.01, rows, [1] * num_rows)
        began = time.thread_time()
        harness.router.turn([result])
        costs.append(time.thread_time() - began)
    return sorted(costs)[len(costs) // 2]


def test_a_decode_step_of_32_rows_costs_little():
    assert median_turn_s(32) < 0.0003
