"""Whole steps of a tiny llama: the tokens of transformers, whatever the batch does around a request."""

import pytest
import torch

from serve.ipc.messages import StepPlan
from serve.model_infer.errors import PlanError
from serve.model_infer.model_runner import ModelRunner
from unit_tests.serve.model_infer.builders import FakeTable, greedy, join
from unit_tests.serve.model_infer.tiny_llama import (
    EPOCH,
    Driver,
    follows_greedily,
    make_runner,
    random_prompt,
    reference_logits,
)


@pytest.fixture
def driver() -> Driver:
    table = FakeTable(num_tokens=512)
    return Driver(make_runner(table), table)


def test_a_prompt_in_one_chunk_and_decoding_are_what_transformers_says(driver: Driver):
    prompt = random_prompt(21, 1)
    driver.join(0, 0, prompt)
    driver.run({0: 21})
    for _ in range(29):
        driver.run()
    assert len(driver.outputs[0]) == 30
    assert follows_greedily(prompt, driver.outputs[0])


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_prompts_around_page_boundaries(driver: Driver, length: int):
    prompt = random_prompt(length, length)
    driver.join(3, 0, prompt)
    driver.run({3: length})
    for _ in range(9):
        driver.run()
    assert follows_greedily(prompt, driver.outputs[0])


def test_what_stands_in_a_page_before_it_is_written_does_not_matter(driver: Driver):
    """A page that a failed row left full of NaN is given to another request."""
    driver.runner._states.leaves()["full"]["kv"].fill_(torch.nan)
    prompt = random_prompt(21, 1)
    driver.join(0, 0, prompt)
    driver.run({0: 18})
    driver.run({0: 3})
    for _ in range(5):
        driver.run()
    assert len(driver.outputs[0]) == 6
    assert follows_greedily(prompt, driver.outputs[0])


def test_requests_that_come_and_go_do_not_disturb_each_other(driver: Driver):
    prompts = {slot: random_prompt(length, slot) for slot, length in enumerate((40, 7, 1, 25))}
    driver.join(0, 0, prompts[0])
    driver.run({0: 13})
    driver.join(1, 1, prompts[1])
    driver.run({0: 20, 1: 7})  # 0 is not through, 1 samples
    driver.run({0: 7})  # the last chunk of 0 beside decoding 1
    driver.join(2, 2, prompts[2])
    driver.run({2: 1})
    driver.run(paused=[0])
    driver.join(1, 3, prompts[3])
    finished = list(driver.outputs[1])
    driver.run({1: 20}, leaves=[1])  # row 1 changes hands within one plan
    driver.run({1: 5}, paused=[2])
    for _ in range(10):
        driver.run()
    assert follows_greedily(prompts[1], finished)
    for slot in (0, 2, 3):
        assert len(driver.outputs[slot]) > 8
        assert follows_greedily(prompts[slot], driver.outputs[slot])


@pytest.mark.parametrize("num_cached", [0, 16, 32])
def test_a_preempted_request_goes_on_where_it_was(driver: Driver, num_cached: int):
    prompt = random_prompt(24, 9)
    driver.join(0, 0, prompt)
    driver.join(1, 1, random_prompt(10, 10))
    driver.run({0: 24, 1: 10})
    for _ in range(15):
        driver.run()
    driver.run(leaves=[0])
    driver.rejoin(4, 0, num_cached)
    known = 24 + len(driver.outputs[0])
    driver.run({4: 5})
    driver.run({4: known - num_cached - 5})
    for _ in range(5):
        driver.run()
    assert follows_greedily(prompt, driver.outputs[0])
    assert follows_greedily(driver.prompts[1], driver.outputs[1])


def test_pages_of_a_prefix_may_be_shared(driver: Driver):
    prompt = random_prompt(40, 5)
    driver.join(0, 0, prompt)
    driver.run({0: 40})
    driver.join(1, 1, prompt[:33])
    shared = driver.pages[0][:2]
    driver.pages[1] = list(shared)
    driver.joins[-1].pages["full"] = list(shared)
    driver.joins[-1].num_cached = driver.lengths[1] = 32
    driver.run({1: 1})
    for _ in range(8):
        driver.run()
    assert follows_greedily(prompt[:33], driver.outputs[1])
    assert follows_greedily(prompt, driver.outputs[0])


def test_prompt_logprobs_come_with_the_chunks(driver: Driver):
    prompt = random_prompt(20, 3)
    driver.join(0, 0, random_prompt(5, 4))
    driver.run({0: 5})
    driver.join(1, 1, prompt, greedy(prompt_logprobs=2, logprobs=1))
    first = driver.run({1: 12})
    second = driver.run({1: 8})
    entries = first.prompt_logprobs[1] + second.prompt_logprobs[1]
    assert [entry.token_id for entry in entries] == prompt[1:]
    expected = reference_logits(prompt).log_softmax(dim=-1)
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=1e-3)
        assert entry.top_ids == expected[place].topk(2).indices.tolist()
    assert second.logprobs[1].top_ids == [int(expected[-1].argmax())]
    assert 0 not in second.logprobs
    assert driver.run().prompt_logprobs == {}
    assert follows_greedily(driver.prompts[0], driver.outputs[0])


def test_a_seeded_request_gives_the_same_text_alone_and_in_a_batch(driver: Driver):
    params = greedy(temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5)
    prompt = random_prompt(18, 6)
    driver.join(0, 0, prompt, params)
    driver.run({0: 18})
    for _ in range(10):
        driver.run()
    driver.run(leaves=[0])
    driver.join(2, 1, random_prompt(30, 7), greedy(temperature=1.0, seed=1))
    driver.join(5, 2, prompt, params)
    driver.run({2: 30, 5: 4})
    driver.run({5: 14})
    for _ in range(10):
        driver.run()
    assert driver.outputs[2] == driver.outputs[0]


class PoisonedModel:
    """Makes the logits of one packed row infinite."""

    def __init__(self, model: object, row: int) -> None:
        self._model, self._row = model, row

    def forward(self, batch: object) -> torch.Tensor:
        logits = self._model.forward(batch)  # type: ignore[attr-defined]
        logits[self._row, 3] = torch.nan
        return logits


def test_only_the_row_with_broken_logits_fails(driver: Driver):
    for row in range(3):
        driver.join(row, row, random_prompt(6 + row, row))
    driver.run({0: 6, 1: 7, 2: 8})
    driver.runner._model = PoisonedModel(driver.runner._model, 1)
    result = driver.run()
    assert set(result.failed_rows) == {1}
    assert result.rows == [0, 2]
    assert follows_greedily(driver.prompts[0], driver.outputs[0])


def test_an_empty_plan_is_answered(driver: Driver):
    result = driver.run()
    assert (result.epoch, result.step, result.rank, result.rows) == (EPOCH, 0, 0, [])
    assert result.compute_s > 0


def running() -> ModelRunner:
    table = FakeTable()
    generation = table.fill(0, [1, 2, 3])
    runner = make_runner(table)
    runner.run(StepPlan(EPOCH, 10, joins=[join(0, 0, generation, 3, [0])]))
    return runner


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(EPOCH, 10), "plan 10 where 11 was due"),
        (StepPlan(EPOCH, 12), "plan 12 where 11 was due"),
        (StepPlan(EPOCH - 1, 11), "epoch"),
        (StepPlan(EPOCH, 11, chunks=[(0, 4)]), "chunk of 4"),
    ],
)
def test_a_plan_that_does_not_fit_stops_the_worker(plan: StepPlan, message: str):
    with pytest.raises(PlanError, match=message):
        running().run(plan)
