"""The parts of steps add up, and recording changes nothing else."""

import time

import torch

from kernels.reference import ReferenceBackend
from serve.model_infer.profiler import Phase, StepProfiler
from unit_tests.serve.model_infer.builders import CPU, FakeTable
from unit_tests.serve.model_infer.tiny_llama import Driver, follows_greedily, make_runner, random_prompt


def test_steps_are_told_apart_and_their_parts_are_all_of_their_time():
    table = FakeTable(num_tokens=512)
    driver = Driver(make_runner(table), table)
    prompt = random_prompt(20, 3)
    driver.join(0, 0, prompt)
    driver.run({0: 10})
    driver.runner.start_profile()
    begun = time.perf_counter()
    driver.run({0: 10})
    for _ in range(6):
        driver.run()
    elapsed = time.perf_counter() - begun
    found = driver.runner.stop_profile()
    driver.run()
    assert follows_greedily(prompt, driver.outputs[0])
    assert {kind: (total["steps"], total["tokens"]) for kind, total in found.items()} == {
        "prefill": (1, 10),
        "decode": (6, 6),
    }
    assert set(found["decode"]["phases"]) == {phase.value for phase in Phase}
    assert set(found["prefill"]["phases"]) == {phase.value for phase in Phase} - {"wait"}
    total = sum(seconds for kind in found.values() for seconds in kind["phases"].values())
    assert 0.5 * elapsed < total <= elapsed
    assert found["decode"]["kernels"]["paged_attention"][0] == 6 * 2  # layers
    assert found["decode"]["kernels"]["logits"][0] == 6
    for kind in found.values():
        assert 0 < sum(seconds for _, seconds in kind["kernels"].values()) <= kind["phases"]["forward"]


def test_nothing_is_recorded_before_the_start_and_after_the_stop():
    table = FakeTable(num_tokens=512)
    driver = Driver(make_runner(table), table)
    assert driver.runner.stop_profile() == {}
    driver.runner.start_profile()
    assert driver.runner.stop_profile() == {}
    driver.join(0, 0, random_prompt(5, 1))
    driver.run({0: 5})
    driver.runner.start_profile()
    assert driver.runner.stop_profile() == {}


def test_a_plan_without_work_is_no_step():
    profiler = StepProfiler(ReferenceBackend(), CPU)
    profiler.start()
    for phase in (Phase.WAIT, Phase.PREPARE):
        profiler.mark(phase)
    profiler.end_step(0, True)
    assert profiler.stop() == {}


def test_a_new_start_forgets_the_old_numbers():
    backend = ReferenceBackend()
    profiler = StepProfiler(backend, CPU)
    profiler.start()
    backend.embedding(torch.tensor([1]), torch.randn(4, 8))
    profiler.end_step(1, True)
    profiler.start()
    backend.embedding(torch.tensor([1]), torch.randn(4, 8))
    profiler.end_step(2, False)
    found = profiler.stop()
    assert [(kind, total["tokens"], total["kernels"]["embedding"][0]) for kind, total in found.items()] == [
        ("prefill", 2, 1)
    ]
